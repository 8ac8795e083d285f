"""Make a judge from the `judge` of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from buffer.config.task import JUDGES, JudgeSpec, JudgingSection, is_url
from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from producer_workers.judges.composed_judge import compose
from producer_workers.judges.function_judge import FunctionJudge, GroupFunctionJudge
from producer_workers.judges.http_judge import HttpJudge
from producer_workers.judges.judge import AnyJudge


def load_judge(spec: str, judging: JudgingSection | None = None) -> AnyJudge:
    """Make a judge from a built-in name, the URL of a service, or "module:function".

    A function with a parameter `states` gets whole groups. Raises ConfigError.
    """
    if is_url(spec):
        return HttpJudge(spec, judging or JudgingSection())
    path = JUDGES[spec].path if spec in JUDGES else spec
    function = load_object(path, kind="judge", built_in=JUDGES)
    if not callable(function):
        raise ConfigError(f"judge {spec!r} is not a function", hint='give "module:function"')
    return judge_from_function(spec, function)


def judge_from_function(name: str, function: Callable[..., Any]) -> AnyJudge:
    """Make a judge from a function."""
    try:
        sees_group = "states" in inspect.signature(function).parameters
    except ValueError:  # a function in C, without a signature
        sees_group = False
    return GroupFunctionJudge(name, function) if sees_group else FunctionJudge(name, function)


def make_judge(spec: JudgeSpec, load: Callable[[str], AnyJudge]) -> AnyJudge:
    """Make a task's judge; `load` makes each judge that it names. Raises ConfigError."""
    if isinstance(spec, str):
        return load(spec)
    branches = {}
    for source, judges in spec.items():
        weights = {judges: 1.0} if isinstance(judges, str) else judges
        branches[source] = [(load(name), weight) for name, weight in weights.items()]
    return compose(branches)
