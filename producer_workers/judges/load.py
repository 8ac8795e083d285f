"""Make a judge from the `judge` of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from buffer.errors import ConfigError, JudgeError
from buffer.imports import import_extra, load_object
from buffer.wire.group import UNPARSED
from buffer.wire.rollout import RolloutState
from producer_workers.call_turns import Turns
from producer_workers.config.sandbox import is_url
from producer_workers.config.task import (
    RUNS_PROGRAMS,
    JudgeSpec,
    JudgingSection,
    TaskSection,
    named_judges,
)
from producer_workers.http_client import Service
from producer_workers.judges.judge import (
    BareJudge,
    FunctionJudge,
    Judge,
    rollout_fields,
    take_columns,
)
from producer_workers.user_code.border import check_answer, is_marked_inline
from producer_workers.user_code.sandbox import check_sandbox


def load_judge(spec: str, judging: JudgingSection | None = None) -> Judge:
    """Make a judge from a built-in name, a service's URL, or "module:function". Raises ConfigError.

    A function with a parameter `states` gets whole groups.
    """
    judging = judging or JudgingSection()
    if is_url(spec):
        return HttpJudge(spec, judging)
    return FunctionJudge(spec, _function(spec, judging), judging)


def load_worker_judge(spec: str, judging: JudgingSection) -> Judge:
    """Make a judge of a rollout worker: in processes, unless marked inline. Raises ConfigError."""
    if is_url(spec):
        return HttpJudge(spec, judging)
    function = _function(spec, judging)
    is_safe = spec in named_judges() and not named_judges()[spec].is_unsafe
    if is_called_inline(function, judging, is_safe=is_safe):
        is_quick = is_safe or is_marked_inline(function)
        return FunctionJudge(spec, function, judging, is_quick=is_quick)
    is_sandboxed = _path(spec) == named_judges()[RUNS_PROGRAMS].path
    options = {"sandbox": judging.sandbox} if is_sandboxed else {}
    return FunctionJudge(spec, function, judging, path=_path(spec), options=options)


def load_for(task: TaskSection, spec: str, load: Callable[[str, JudgingSection], Judge]) -> Judge:
    """Make one judge of a task: by `load`, unless a package attaches it. Raises ConfigError."""
    section = task.attached.get(spec)
    judge: Judge = section.scorer(task.judging) if section else load(spec, task.judging)
    return judge


def load_bare_judge(spec: str, judging: JudgingSection) -> Judge:
    """Make a judge for a debugger (`BareJudge`). Raises ConfigError."""
    return HttpJudge(spec, judging) if is_url(spec) else BareJudge(spec, _function(spec, judging))


def is_called_inline(
    function: Callable[..., Any], judging: JudgingSection, *, is_safe: bool
) -> bool:
    """Return whether a worker calls a function in its own process; `is_safe`: a built-in one."""
    if judging.kind in ("inline", "process"):
        return judging.kind == "inline"
    return is_safe or is_marked_inline(function)


def _path(spec: str) -> str:
    return named_judges()[spec].path if spec in named_judges() else spec


def _function(spec: str, judging: JudgingSection) -> Callable[..., Any]:
    function = load_object(_path(spec), kind="judge", built_in=named_judges())
    if not callable(function):
        raise ConfigError(f"judge {spec!r} is not a function", hint='give "module:function"')
    chosen: Callable[..., Any] = function
    if spec == RUNS_PROGRAMS:
        check_sandbox(judging.sandbox)
        return partial(chosen, sandbox=judging.sandbox)
    return chosen


def make_judge(spec: JudgeSpec, load: Callable[[str], Judge]) -> Judge:
    """Make a task's judge; `load` makes each judge that it names. Raises ConfigError."""
    if isinstance(spec, str):
        return load(spec)
    branches = {}
    for source, judges in spec.items():
        weights = {judges: 1.0} if isinstance(judges, str) else judges
        branches[source] = [(load(name), weight) for name, weight in weights.items()]
    return ComposedJudge(branches)


def check_truth(spec: JudgeSpec, source: str | None, truth: Any) -> None:
    """Raise ValueError if no judge, or no answer, fits a problem's data source and ground truth.

    Only built-in judges say which ground truths they take.
    """
    chosen: str | Mapping[str, Any] = spec
    if isinstance(spec, dict):
        chosen = next((spec[pattern] for pattern in spec if fnmatchcase(source or "", pattern)), {})
        if not chosen:
            known = ", ".join(spec)
            raise ValueError(f"no judge for the data source {source or ''!r} (known: {known})")
    for name in [chosen] if isinstance(chosen, str) else chosen:
        if name in named_judges() and named_judges()[name].takes:
            try:
                load_object(named_judges()[name].takes, kind="judge")(truth)
            except ValueError as error:
                raise ValueError(f"judge {name}: {error}") from error


Weighted = Sequence[tuple[Judge, float]]


class ComposedJudge(Judge):
    """Judges by `branches`, from pattern of the data source to judges with weights."""

    name = "composed"

    def __init__(self, branches: Mapping[str, Weighted]) -> None:
        self._branches = branches
        self.sees_group = any(
            judge.sees_group for judges in branches.values() for judge, _ in judges
        )

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        source = states[0].data_source  # a group has one
        fitting = (self._branches[key] for key in self._branches if fnmatchcase(source or "", key))
        judges = next(fitting, None)
        if judges is None:
            known = ", ".join(self._branches)
            raise JudgeError(
                f"no judge for data source {source!r}",
                hint=f'known: {known}; "*" fits every source',
            )
        columns = await asyncio.gather(*(judge.judge_group(states) for judge, _ in judges))
        weights = [weight for _, weight in judges]
        names = [judge.name for judge, _ in judges]
        return [_sum(names, weights, rewards) for rewards in zip(*columns, strict=True)]


def _sum(
    names: Sequence[str], weights: Sequence[float], rewards: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return the weighted sum; a single judge of weight 1 keeps its reward."""
    if len(rewards) == 1 and weights[0] == 1.0:
        return rewards[0]
    parts = {name: reward["score"] for name, reward in zip(names, rewards, strict=True)}
    score = sum(weight * reward["score"] for weight, reward in zip(weights, rewards, strict=True))
    unparsed = [reward[UNPARSED] for reward in rewards if UNPARSED in reward]
    return {**parts, "score": score} | ({UNPARSED: min(unparsed)} if unparsed else {})


class HttpJudge(Judge):
    """Judges at one URL. `judging` limits the time of an answer and the number of retries."""

    def __init__(
        self, url: str, judging: JudgingSection, *, what: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        self.name = url
        what = what or f"judge {url}"
        import_extra("aiohttp", what)  # at the start, not later
        hint = "check the service, or raise [tasks.<name>.judging] timeout_s"
        self._service = Service(what, url, judging.timeout_s, judging.retries, hint, headers)

    def under(self, turns: Turns) -> Judge:
        self._service = replace(self._service, turns=turns)
        return self

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        (state,) = states
        answer = await self._service.ask(rollout_fields(state))
        return take_columns(self.name, states, [check_answer(self.name, answer)])
