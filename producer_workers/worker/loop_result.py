"""What an agent loop must hand back, checked where it does: a mistake in a user's loop is told, not
trained.

A response on another prompt than the group's, or tokens of which nobody knows who sampled them,
would look like any other group to a trainer.

Which completed groups are worth training on (XTuner's `is_valid_sample_fn`, DAPO's dynamic
sampling).

A filter looks at a whole, judged group. What it turns away is counted as filtered, its raw rewards
too, its payload is freed, and the producer starts another group in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from buffer.config.strategy import FILTERS
from buffer.errors import ConfigError, RolloutMQError
from buffer.model.dotted_path import load_object
from buffer.model.rollout import RolloutState, Status


class LoopError(RolloutMQError):
    """An agent loop handed back something that is no group of rollouts: which one, and what is
    missing.
    """


def check_result(given: Sequence[int], made: Any) -> list[RolloutState]:
    """What the loop made of the rollouts with these indexes. Raises LoopError."""
    if not isinstance(made, list) or not all(isinstance(state, RolloutState) for state in made):
        raise LoopError(
            f"the agent loop returned {made!r:.80}",
            hint="return the list of states that it was given",
        )
    if lost := set(given) - {state.index for state in made}:
        hint = "return every rollout; one that cannot be made is FAILED, with its `error`"
        raise LoopError(
            f"the agent loop returned nothing for the rollouts {sorted(lost)}", hint=hint
        )
    alive = [state for state in made if state.status is not Status.FAILED]
    for state in alive:
        _check_rollout(state)
    _check_prompts(alive)
    return made


def _check_rollout(state: RolloutState) -> None:
    where = f"rollout {state.index}"
    if state.status not in (Status.COMPLETED, Status.ABORTED):
        hint = "set it: COMPLETED (with a reward), ABORTED (a pause cut it off) or FAILED (with its `error`)"
        raise LoopError(f"{where} came back with status {state.status.value}", hint=hint)
    tokens = len(state.response_ids)
    if len(state.logprobs) != tokens or (
        state.response_mask is not None and len(state.response_mask) != tokens
    ):
        raise LoopError(
            f"{where}: response_ids, logprobs and response_mask differ in length", hint=_APPEND
        )
    trained = tokens if state.response_mask is None else int(np.count_nonzero(state.response_mask))
    if sum(span.length for span in state.spans) < trained:
        raise LoopError(
            f"{where} trains {trained} tokens, and its spans do not say which weights made them all",
            hint=_APPEND,
        )
    if state.status is Status.COMPLETED and not math.isfinite(
        (state.reward or {}).get("score", math.nan)
    ):
        hint = 'the judge, or the loop, gives it {"score": ...}, a finite number'
        raise LoopError(f"{where} is completed without a reward", hint=hint)


_APPEND = "state.append(made.token_ids, made.logprobs, made.spans) for what was sampled, state.read(ids) for the rest"


def _check_prompts(states: Sequence[RolloutState]) -> None:
    for state in states[1:]:
        if not np.array_equal(state.prompt_ids, states[0].prompt_ids):  # type: ignore[arg-type]
            hint = "a group has one prompt; what else a rollout read goes into its response: state.read(ids)"
            raise LoopError(
                f"rollout {state.index} has another prompt than rollout {states[0].index}",
                hint=hint,
            )


SampleFilter = Callable[[Sequence[RolloutState]], bool]


def not_all_equal(states: Sequence[RolloutState]) -> bool:
    """Whether the scores differ: equal ones have no advantage, so no gradient (Yu et al. 2025,
    DAPO, section 3.2).
    """
    return len({state.reward["score"] for state in states if state.reward}) > 1


def load_sample_filter(spec: str | None) -> SampleFilter | None:
    """A built-in filter by name, or the function at "module:function". Raises ConfigError."""
    if spec is None:
        return None
    function = load_object(FILTERS.get(spec, spec), kind="sample filter", built_in=FILTERS)
    if not callable(function):
        raise ConfigError(
            f"sample filter {spec!r} is not a function", hint='give "module:function"'
        )
    chosen: SampleFilter = function
    return chosen
