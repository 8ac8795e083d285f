"""Make a judge from the `judge` of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from buffer.errors import ConfigError
from buffer.imports import load_object
from producer_workers.config.sandbox import is_url
from producer_workers.config.task import JUDGES, RUNS_PROGRAMS, JudgeSpec, JudgingSection
from producer_workers.judges.composed_judge import compose
from producer_workers.judges.function_judge import (
    LIMIT_S,
    FunctionJudge,
    GroupFunctionJudge,
    GroupProcessJudge,
    ProcessJudge,
)
from producer_workers.judges.http_judge import HttpJudge
from producer_workers.judges.judge import AnyJudge
from producer_workers.user_code.runs_inline import is_marked_inline
from producer_workers.user_code.sandbox import check_sandbox


def load_judge(spec: str, judging: JudgingSection | None = None) -> AnyJudge:
    """Make a judge of this process from a built-in name, a service's URL, or "module:function".

    A function with a parameter `states` gets whole groups. Raises ConfigError.
    """
    judging = judging or JudgingSection()
    if is_url(spec):
        return HttpJudge(spec, judging)
    return judge_from_function(spec, _function(spec, judging), judging.timeout_s)


def load_worker_judge(spec: str, judging: JudgingSection) -> AnyJudge:
    """Make a judge as a rollout worker calls it: in processes, unless it is marked inline.

    Raises ConfigError.
    """
    if is_url(spec):
        return HttpJudge(spec, judging)
    function = _function(spec, judging)
    is_safe = spec in JUDGES and not JUDGES[spec].is_unsafe
    if is_called_inline(function, judging, is_safe=is_safe):
        return judge_from_function(spec, function, judging.timeout_s)
    kind = GroupProcessJudge if _sees_group(function) else ProcessJudge
    is_coroutine = inspect.iscoroutinefunction(function)
    return kind(spec, _path(spec), judging, is_coroutine=is_coroutine)


def is_called_inline(
    function: Callable[..., Any], judging: JudgingSection, *, is_safe: bool
) -> bool:
    """Return whether a worker calls a function in its own process; `is_safe`: a built-in one."""
    if judging.kind in ("inline", "process"):
        return judging.kind == "inline"
    return is_safe or is_marked_inline(function)


def judge_from_function(
    name: str, function: Callable[..., Any], limit_s: float = LIMIT_S
) -> AnyJudge:
    """Make a judge of this process from a function; `limit_s` limits each call."""
    kind = GroupFunctionJudge if _sees_group(function) else FunctionJudge
    return kind(name, function, limit_s)


def _path(spec: str) -> str:
    return JUDGES[spec].path if spec in JUDGES else spec


def _function(spec: str, judging: JudgingSection) -> Callable[..., Any]:
    function = load_object(_path(spec), kind="judge", built_in=JUDGES)
    if not callable(function):
        raise ConfigError(f"judge {spec!r} is not a function", hint='give "module:function"')
    chosen: Callable[..., Any] = function
    if spec == RUNS_PROGRAMS:
        check_sandbox(judging.sandbox)
        return partial(chosen, sandbox=judging.sandbox)
    return chosen


def _sees_group(function: Callable[..., Any]) -> bool:
    try:
        return "states" in inspect.signature(function).parameters
    except ValueError:  # a function in C, without a signature
        return False


def make_judge(spec: JudgeSpec, load: Callable[[str], AnyJudge]) -> AnyJudge:
    """Make a task's judge; `load` makes each judge that it names. Raises ConfigError."""
    if isinstance(spec, str):
        return load(spec)
    branches = {}
    for source, judges in spec.items():
        weights = {judges: 1.0} if isinstance(judges, str) else judges
        branches[source] = [(load(name), weight) for name, weight in weights.items()]
    return compose(branches)
