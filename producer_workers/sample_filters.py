"""Which completed groups are worth training on (XTuner's `is_valid_sample_fn`, DAPO's dynamic sampling).

A filter looks at a whole, judged group. What it turns away is counted as filtered, its raw rewards too, its payload
is freed, and the producer starts another group in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from buffer.dotted_path import load_object
from buffer.errors import ConfigError
from buffer.rollout import RolloutState

SampleFilter = Callable[[Sequence[RolloutState]], bool]


def not_all_equal(states: Sequence[RolloutState]) -> bool:
    """Whether the scores differ: equal ones have no advantage, so no gradient (Yu et al. 2025, DAPO, section 3.2)."""
    return len({state.reward["score"] for state in states if state.reward}) > 1


BUILT_IN: dict[str, SampleFilter] = {"not_all_equal": not_all_equal}


def load_sample_filter(spec: str | None) -> SampleFilter | None:
    """A built-in filter by name, or the function at "module:function". Raises ConfigError."""
    if spec is None:
        return None
    function = BUILT_IN.get(spec) or load_object(spec, kind="sample filter", built_in=BUILT_IN)
    if not callable(function):
        raise ConfigError(f"sample filter {spec!r} is not a function", hint='give "module:function"')
    chosen: SampleFilter = function
    return chosen
