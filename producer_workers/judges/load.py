"""From the `judge` of a configuration to a judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer.dotted_path import load_object
from buffer.errors import ConfigError
from producer_workers.judges.exact_match import exact_match
from producer_workers.judges.function_judge import FunctionJudge
from producer_workers.judges.gsm8k import gsm8k
from producer_workers.judges.judge import Judge
from producer_workers.judges.reasoning_gym_judge import reasoning_gym_score

BUILT_IN: dict[str, Callable[..., Any]] = {
    "reasoning_gym": reasoning_gym_score,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
}


def load_judge(spec: str) -> Judge:
    """A built-in judge by name, or the function at "module:function". Raises ConfigError."""
    function = BUILT_IN.get(spec) or load_object(spec, kind="judge", built_in=BUILT_IN)
    if not callable(function):
        raise ConfigError(f"judge {spec!r} is not a function", hint='give "module:function"')
    return FunctionJudge(spec, function)
