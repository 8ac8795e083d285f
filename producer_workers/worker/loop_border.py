"""Checks what an agent loop returns, and which completed groups are worth training on.

A mistake in a user's loop is reported where it is made: a response to another prompt, or tokens of
unknown weights, would look like any other group to a trainer.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.config.sections.strategy import FILTERS
from buffer.errors import ConfigError, RolloutMQError
from buffer.model.dotted_path import load_object
from buffer.rollouts.group import GROUP_TIME, OPEN_SESSIONS, SESSIONS_RESTARTED
from buffer.rollouts.own_copy import own_copy, own_rollout
from buffer.rollouts.rollout import PolicyVersion, RolloutState, Status
from producer_workers.user_code.process_function import Call


class LoopError(RolloutMQError):
    """An agent loop returned something that is not a group of rollouts."""


_APPEND = (
    "use state.append(made.token_ids, made.logprobs, made.spans) for sampled tokens, "
    "state.read(ids) for all others"
)


def check_result(
    drawn: Drawn, given: Sequence[RolloutState], made: Any, *, makes_prompts: bool = False
) -> list[RolloutState]:
    """Return copies of what the loop made of the rollouts `given`, see `Drawn.restore`.

    `makes_prompts`: the loop may give the group a prompt of its own. Raises LoopError.
    """
    if not isinstance(made, list) or not all(isinstance(state, RolloutState) for state in made):
        raise LoopError(
            f"the agent loop returned {made!r:.80}",
            hint="return the list of states that it was given",
        )
    _check_indexes({state.index for state in given}, {state.index for state in made})
    for state in made:
        if not isinstance(state.extra, dict):
            message = f"rollout {state.index} has {type(state.extra).__name__} as `extra`"
            raise LoopError(message, hint="it is a dict")
    restored = drawn.restore(given, made, makes_prompts=makes_prompts)
    alive = [state for state in restored if state.status is not Status.FAILED]
    for state in alive:
        _check_rollout(state)
    _check_prompts(alive)
    if alive and not makes_prompts and not _same(alive[0].prompt_ids, drawn.prompt_ids):
        raise LoopError(
            "the agent loop changed the prompt of the group",
            hint="leave prompt_ids as they are, or set `makes_prompts = True` in the loop's class",
        )
    if not makes_prompts:  # tokens may move between prompt and response
        _check_known(given, alive)
    for state in restored:
        if state.status is Status.FAILED:  # the group is stored with one prompt
            state.prompt_ids = alive[0].prompt_ids if alive else drawn.prompt_ids
    return restored


def _check_indexes(given: set[int], made: set[int]) -> None:
    if lost := given - made:
        raise LoopError(
            f"the agent loop returned nothing for the rollouts {sorted(lost)}",
            hint="return every rollout; one that cannot be made is FAILED, with its `error`",
        )
    if invented := made - given:
        raise LoopError(
            f"the agent loop returned rollouts that it was not given: {sorted(invented)}",
            hint="several states of one rollout have its `index`",
        )


def check_weights(
    claimed: Sequence[RolloutState],
    made: Sequence[RolloutState],
    sampled: Collection[PolicyVersion],
) -> None:
    """Check that all tokens are stamped with weights that made them (I9).

    `sampled`: the weights of everything that the engine has returned. Raises LoopError.
    """
    alive = [state for state in made if state.status is not Status.FAILED]
    if invented := _weights_of(alive) - _weights_of(claimed) - set(sampled):
        names = ", ".join(sorted(map(str, invented)))
        raise LoopError(f"spans name weights that sampled nothing here: {names}", hint=_APPEND)


def _weights_of(states: Sequence[RolloutState]) -> frozenset[PolicyVersion]:
    spans = (span for state in states for span in state.spans)
    return frozenset(PolicyVersion(span.lineage, span.version) for span in spans)


def _same(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    return left is right or np.array_equal(left, right)  # type: ignore[arg-type]


def _is_prefix(made: NDArray[Any], known: NDArray[Any]) -> bool:
    return np.array_equal(made[: len(known)], known)


def _check_rollout(state: RolloutState) -> None:
    name = f"rollout {state.index}"
    if state.status not in (Status.COMPLETED, Status.ABORTED):
        raise LoopError(
            f"{name} came back with status {state.status.value}",
            hint="set COMPLETED (with a reward), ABORTED (by a pause) or FAILED (with its `error`)",
        )
    tokens = len(state.response_ids)
    mask = state.response_mask
    if len(state.logprobs) != tokens or (mask is not None and len(mask) != tokens):
        message = f"{name}: response_ids, logprobs and response_mask differ in length"
        raise LoopError(message, hint=_APPEND)
    trained = tokens if mask is None else int(np.count_nonzero(mask))
    if sum(span.length for span in state.spans) < trained:
        message = f"{name} trains {trained} tokens, but its spans do not cover them all"
        raise LoopError(message, hint=_APPEND)
    score = (state.reward or {}).get("score", math.nan)
    if state.status is Status.COMPLETED and not math.isfinite(score):
        hint = 'the judge, or the loop, gives it {"score": ...}, a finite number'
        raise LoopError(f"{name} is completed without a reward", hint=hint)


def _check_known(given: Sequence[RolloutState], alive: Sequence[RolloutState]) -> None:
    for known in given:
        made = [state for state in alive if state.index == known.index]
        if made and not any(_keeps(state, known) for state in made):
            raise LoopError(
                f"the agent loop changed tokens that rollout {known.index} had before",
                hint="add to a rollout with state.append and state.read, or discard all that it "
                "has with state.reset_response()",
            )


def _keeps(made: RolloutState, known: RolloutState) -> bool:
    """Return whether a rollout that continues `known` has its tokens. It may have started again."""
    count = len(known.spans)
    if not count or len(made.spans) == count or made.spans[:count] != known.spans:
        return True
    return _is_prefix(made.response_ids, known.response_ids) and _is_prefix(
        made.logprobs, known.logprobs
    )


def _check_prompts(states: Sequence[RolloutState]) -> None:
    for state in states[1:]:
        if not _same(state.prompt_ids, states[0].prompt_ids):
            raise LoopError(
                f"rollout {state.index} has another prompt than rollout {states[0].index}",
                hint="a group has one prompt; add what else a rollout read with state.read(ids)",
            )


Within = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Returns what the call named `what` returns."""

SampleFilter = Callable[[Sequence[RolloutState]], bool]
"""Whether a whole, judged group is worth training on (the reference's `is_valid_sample_fn`).

A group that is turned away is counted as filtered, with its raw rewards; its payload is freed, and
the producer starts another group in its stead.
"""


class GroupFilter:
    """Asks the filter `what`, of the user or built in, by `call`.

    `within`: runs the call, as `WatchedJudges.run` does.
    """

    def __init__(self, what: str, call: Call, within: Within) -> None:
        self._what = what
        self._call = call
        self._within = within

    async def keeps(self, states: Sequence[RolloutState]) -> bool:
        """Return whether a completed group is worth training on.

        Raises JudgeError, and what `within` raises.
        """
        return bool(await self._within(self._what, partial(self._call, states)))


def not_all_equal(states: Sequence[RolloutState]) -> bool:
    """Return whether the scores differ: equal ones have no advantage, and so no gradient.

    Source: Yu et al. 2025, DAPO, section 3.2.
    """
    return len({state.reward["score"] for state in states if state.reward}) > 1


def load_sample_filter(spec: str) -> SampleFilter:
    """Return the built-in filter of that name, or the function at "module:function".

    Raises ConfigError.
    """
    function = load_object(FILTERS.get(spec, spec), kind="sample filter", built_in=FILTERS)
    if not callable(function):
        raise ConfigError(
            f"sample filter {spec!r} is not a function", hint='give "module:function"'
        )
    chosen: SampleFilter = function
    return chosen


FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "multimodal",
    "sample_params",
    "data_source",
    "ground_truth",
)
"""The fields of a rollout that no agent loop changes, beside `prompt_ids`."""

_RECORDS = (GROUP_TIME, OPEN_SESSIONS, SESSIONS_RESTARTED)


class Drawn:
    """What was drawn for a group, and its prompt as it was claimed.

    A loop that makes prompts may have given a group another prompt at an earlier claim; only
    rollouts that begin are lent the drawn one then.
    """

    def __init__(self, claimed: Sequence[RolloutState], drawn: Sequence[RolloutState]) -> None:
        """Keep the rollouts as they were claimed, and as they were drawn; nobody may change them.

        A rollout that is not in `drawn` counts as drawn as it was claimed.
        """
        self._drawn = {state.index: state for state in [*reversed(claimed), *drawn]}
        self.prompt_ids = _immutable(claimed[0].prompt_ids)

    def lend(
        self, states: Sequence[RolloutState], *, makes_prompts: bool = False
    ) -> list[RolloutState]:
        """Return copies of the rollouts of this group for its agent loop."""
        lent = []
        for state in states:
            prompt_ids = self.prompt_ids
            if makes_prompts:
                source = self._drawn[state.index] if _begins(state) else state
                prompt_ids = _immutable(source.prompt_ids)
            fields = {name: own_copy(value) for name, value in self._fields(state).items()}
            lent.append(own_rollout(state, **fields, prompt_ids=prompt_ids))
        return lent

    def restore(
        self,
        given: Sequence[RolloutState],
        made: Sequence[RolloutState],
        *,
        makes_prompts: bool = False,
    ) -> list[RolloutState]:
        """Return copies of what the loop made, without its changes of what was drawn.

        `given`: the rollouts of which it got copies. COMPLETED ones are returned as they were given
        (a loop that makes prompts may count other tokens of them to the prompt).
        """
        kept: dict[int, list[RolloutState]] = {}
        for state in () if makes_prompts else given:
            if state.status is Status.COMPLETED:
                kept.setdefault(state.index, []).append(state)
        restored = []
        for state in made:
            if state.index not in kept:
                restored.append(own_rollout(state, **self._fields(state)))
            else:
                restored += kept[state.index]
                kept[state.index] = []
        return restored

    def _fields(self, state: RolloutState) -> dict[str, Any]:
        """Return the fields that a rollout has as they were drawn."""
        drawn = self._drawn[state.index]
        fields: dict[str, Any] = {name: getattr(drawn, name) for name in FIELDS}
        if _begins(state):
            records = {name: state.extra[name] for name in _RECORDS if name in state.extra}
            fields["extra"] = drawn.extra | own_copy(records)
        return fields


def _begins(state: RolloutState) -> bool:
    """Return whether a rollout is generated from its prompt."""
    return not len(state.response_ids) and state.status is not Status.COMPLETED


def _immutable(column: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    """Return a copy that cannot be made writable."""
    return None if column is None else np.ndarray(column.shape, column.dtype, column.tobytes())
