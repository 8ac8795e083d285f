"""The border to an agent loop: it works on copies, and its rollouts are checked and copied again.

    drawn ──lend──▶ copies ──▶ agent loop ──▶ its rollouts ──accept──▶ rollouts of the worker

A loop may change the response, `extra`, and, if it makes prompts, `prompt_ids`. Without the check,
a trainer could not notice a response to another prompt or of other weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import RolloutMQError
from buffer.wire.group import AGENT_RECORD, GROUP_TIME
from buffer.wire.own_copy import own_copy, own_rollout
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan

# The fields that no agent loop changes, beside `prompt_ids`.
DRAWN = (
    "messages", "tools", "tool_choice", "multimodal", "sample_params", "data_source",
    "ground_truth",
)  # fmt: skip

_APPEND = (
    "use state.append(made.token_ids, made.logprobs, made.spans, **made.columns) for sampled "
    "tokens, state.read(ids) for all others"
)


class LoopError(RolloutMQError):
    """An agent loop returned something that is not a group of rollouts."""


class LoopInput:
    """What an agent loop gets for one group: the rollouts as they were drawn, and their prompt.

    `makes_prompts`: the loop may give the group a prompt of its own, also at an earlier claim; then
    only rollouts that begin get the drawn prompt. `is_ours`: nobody keeps a reference to what the
    loop returns, so it is not copied again.
    """

    def __init__(
        self,
        claimed: Sequence[RolloutState],
        drawn: Sequence[RolloutState],
        *,
        makes_prompts: bool = False,
        is_ours: bool = False,
    ) -> None:
        """Keep both lists; a rollout that is not in `drawn` was drawn as it was claimed."""
        self._drawn = {state.index: state for state in [*reversed(claimed), *drawn]}
        self._prompt_ids = _immutable(claimed[0].prompt_ids)
        self._makes_prompts = makes_prompts
        self._is_ours = is_ours

    def lend(self, states: Sequence[RolloutState]) -> list[RolloutState]:
        lent = []
        for state in states:
            prompt_ids = self._prompt_ids
            if self._makes_prompts:
                source = self._drawn[state.index] if _begins(state) else state
                prompt_ids = _immutable(source.prompt_ids)
            lent.append(own_rollout(state, **own_copy(self._fields(state)), prompt_ids=prompt_ids))
        return lent

    def accept(self, given: Sequence[RolloutState], made: Any) -> list[RolloutState]:
        """Return checked copies of the loop's rollouts, with the drawn fields restored.

        `given`: the rollouts whose copies the loop got. Raises LoopError.
        """
        _check_states(given, made)
        restored = self._restore(given, made)
        alive: list[RolloutState] = []
        for state in restored:
            if state.status is Status.FAILED:
                continue
            _check_rollout(state)
            alive.append(state)
            if not np.array_equal(state.prompt_ids, alive[0].prompt_ids):  # type: ignore[arg-type]
                raise LoopError(
                    f"rollout {state.index} has another prompt than rollout {alive[0].index}",
                    hint="a group has one prompt; add what else a rollout read with "
                    "state.read(ids)",
                )
        prompt_ids = alive[0].prompt_ids if alive else self._prompt_ids
        if not self._makes_prompts:  # otherwise, tokens may move between prompt and response
            if not np.array_equal(prompt_ids, self._prompt_ids):  # type: ignore[arg-type]
                raise LoopError(
                    "the agent loop changed the prompt of the group",
                    hint="leave prompt_ids as they are, or set `makes_prompts = True` in the "
                    "loop's class",
                )
            _check_known(given, alive)
        for state in restored:
            if state.status is Status.FAILED:  # the group is stored with one prompt
                state.prompt_ids = prompt_ids
        return restored

    def _restore(
        self, given: Sequence[RolloutState], made: Sequence[RolloutState]
    ) -> list[RolloutState]:
        """Return copies with the drawn fields; COMPLETED rollouts stay as they were given."""
        kept: dict[int, list[RolloutState]] = {}
        for state in () if self._makes_prompts else given:
            if state.status is Status.COMPLETED:
                kept.setdefault(state.index, []).append(state)
        restored = []
        for state in made:
            if state.index not in kept:
                fields = self._fields(state)
                if self._is_ours:
                    state.__dict__.update(fields)
                restored.append(state if self._is_ours else own_rollout(state, **fields))
            else:
                restored += kept[state.index]
                kept[state.index] = []
        return restored

    def _fields(self, state: RolloutState) -> dict[str, Any]:
        drawn = self._drawn[state.index]
        fields: dict[str, Any] = {}
        for name in DRAWN:
            fields[name] = getattr(drawn, name)
        if _begins(state):
            fields["extra"] = dict(drawn.extra)
            for name in (GROUP_TIME, *AGENT_RECORD):
                if name in state.extra:
                    fields["extra"][name] = own_copy(state.extra[name])
        return fields


def check_weights(
    claimed: Sequence[RolloutState],
    made: Sequence[RolloutState],
    sampled: Collection[PolicyVersion],
) -> None:
    """Raise LoopError unless the stamps of all tokens are of weights in `sampled` (I9)."""
    known = set(sampled)
    for state in claimed:
        known.update(map(_weights, state.spans))
    named = set[PolicyVersion]()
    for state in made:
        if state.status is not Status.FAILED:
            named.update(map(_weights, state.spans))
    if invented := named - known:
        names = ", ".join(sorted(map(str, invented)))
        raise LoopError(f"spans name weights that sampled nothing here: {names}", hint=_APPEND)


def _weights(span: VersionSpan) -> PolicyVersion:
    return PolicyVersion(span.lineage, span.version)


def _check_states(given: Sequence[RolloutState], made: Any) -> None:
    if not isinstance(made, list) or not all(isinstance(state, RolloutState) for state in made):
        raise LoopError(
            f"the agent loop returned {made!r:.80}",
            hint="return the list of states that it was given",
        )
    wanted = {state.index for state in given}
    found = {state.index for state in made}
    if lost := wanted - found:
        raise LoopError(
            f"the agent loop returned nothing for the rollouts {sorted(lost)}",
            hint="return every rollout; one that cannot be made is FAILED, with its `error`",
        )
    if invented := found - wanted:
        raise LoopError(
            f"the agent loop returned rollouts that it was not given: {sorted(invented)}",
            hint="several states of one rollout have its `index`",
        )
    for state in made:
        if not isinstance(state.extra, dict):
            message = f"rollout {state.index} has {type(state.extra).__name__} as `extra`"
            raise LoopError(message, hint="it is a dict")


def _check_rollout(state: RolloutState) -> None:
    name = " ".join(["rollout", str(state.index), state.role]).strip()
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
        if not known.spans:
            continue
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
    if len(made.spans) == count or made.spans[:count] != known.spans:
        return True
    tokens = len(known.response_ids)
    return np.array_equal(made.response_ids[:tokens], known.response_ids) and np.array_equal(
        made.logprobs[:tokens], known.logprobs
    )


def _begins(state: RolloutState) -> bool:
    return not len(state.response_ids) and state.status is not Status.COMPLETED


def _immutable(column: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    """Return a copy that cannot be made writable."""
    return None if column is None else np.ndarray(column.shape, column.dtype, column.tobytes())
