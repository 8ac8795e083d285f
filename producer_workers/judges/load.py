"""From the `judge` of a configuration to a judge."""

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
    """A built-in judge by name, the service at a URL, or the function at "module:function". Raises
    ConfigError.

    A function with a parameter `states` sees whole groups.
    """
    if is_url(spec):
        return HttpJudge(spec, judging or JudgingSection())
    path = JUDGES[spec].path if spec in JUDGES else spec
    function = load_object(path, kind="judge", built_in=JUDGES)
    if not callable(function):
        raise ConfigError(f"judge {spec!r} is not a function", hint='give "module:function"')
    return judge_of(spec, function)


def judge_of(name: str, function: Callable[..., Any]) -> AnyJudge:
    """The judge that a function is."""
    try:
        sees_group = "states" in inspect.signature(function).parameters
    except ValueError:  # of C, without a signature
        sees_group = False
    return GroupFunctionJudge(name, function) if sees_group else FunctionJudge(name, function)


def put_together(spec: JudgeSpec, load: Callable[[str], AnyJudge]) -> AnyJudge:
    """What a task names as its judge; `load` makes a judge of each name in it. Raises ConfigError."""
    if isinstance(spec, str):
        return load(spec)
    weighted = {
        source: {judges: 1.0} if isinstance(judges, str) else judges
        for source, judges in spec.items()
    }
    return compose(
        {
            s: [(load(name), weight) for name, weight in judges.items()]
            for s, judges in weighted.items()
        }
    )
