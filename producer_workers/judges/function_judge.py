"""Judge with one Python function, the user's or a built-in one.

`function(response=..., ground_truth=..., state=...)` returns a number, or a dict of numbers with
"score" and perhaps token columns (`TOKEN_COLUMNS`). `function(states=[...])` gets whole groups, and
returns one reward for each rollout, in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from buffer.errors import JudgeError
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JUDGES, RUNS_PROGRAMS, JudgingSection
from producer_workers.judges.judge import take_columns
from producer_workers.user_code.border import Rules, load_border
from producer_workers.user_code.process_function import Call, ProcessFunction
from producer_workers.user_code.rollout_border import BORDERS, Shape
from producer_workers.user_code.user_function import UserFunction

LIMIT_S: float = JudgingSection().timeout_s


def function_rules(
    what: str, name: str, judging: JudgingSection, *, is_coroutine: bool = False
) -> Rules:
    """Return how a judge, or a filter of groups, is called."""
    return Rules(
        what=what,
        name=name,
        limit_s=judging.timeout_s,
        limit_key="[tasks.<name>.judging] timeout_s",
        memory_mb=judging.memory_mb,
        memory_key="[tasks.<name>.judging] memory_mb",
        processes=judging.processes,
        mode="coroutines" if is_coroutine else "plain",
        error=JudgeError,
        hint="see the rollout that it got in the dead letter",
    )


def call_here(
    what: str, name: str, function: Callable[..., Any], shape: Shape, limit_s: float
) -> UserFunction:
    """Return what calls a judge or a filter in this process; `limit_s` limits each call."""
    judging = JudgingSection(timeout_s=limit_s)
    is_coroutine = inspect.iscoroutinefunction(function)
    rules = function_rules(what, name, judging, is_coroutine=is_coroutine)
    return UserFunction(function, load_border(BORDERS[shape]), rules)


class _Single:
    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self._call = call

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the checked reward. Raises JudgeError with the judge's name and what it raised."""
        return take_columns(self.name, state, await self._call([state]))


class _Group:
    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self._call = call

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        answers = await self._call(states)
        return [take_columns(self.name, *pair) for pair in zip(states, answers, strict=True)]


class FunctionJudge(_Single):
    """Judges single rollouts with `function`, in this process; `limit_s` limits each call."""

    def __init__(self, name: str, function: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
        super().__init__(name, call_here(_what(name), name, function, "rollout", limit_s))


class GroupFunctionJudge(_Group):
    """Judges whole groups with `function`, in this process; `limit_s` limits each call."""

    def __init__(self, name: str, function: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
        super().__init__(name, call_here(_what(name), name, function, "group", limit_s))


class ProcessJudge(_Single):
    """Judges single rollouts with the function at `path`, in processes of its own."""

    def __init__(
        self, name: str, path: str, judging: JudgingSection, *, is_coroutine: bool
    ) -> None:
        function = _in_processes(name, path, "rollout", judging, is_coroutine)
        super().__init__(name, function)
        self.close = function.close


class GroupProcessJudge(_Group):
    """Judges whole groups with the function at `path`, in processes of its own."""

    def __init__(
        self, name: str, path: str, judging: JudgingSection, *, is_coroutine: bool
    ) -> None:
        function = _in_processes(name, path, "group", judging, is_coroutine)
        super().__init__(name, function)
        self.close = function.close


def _what(name: str) -> str:
    return f"judge {name!r}"


def _in_processes(
    name: str, path: str, shape: Shape, judging: JudgingSection, is_coroutine: bool
) -> ProcessFunction:
    rules = function_rules(_what(name), name, judging, is_coroutine=is_coroutine)
    takes_sandbox = path == JUDGES[RUNS_PROGRAMS].path
    options = {"sandbox": judging.sandbox} if takes_sandbox else {}
    return ProcessFunction(path, BORDERS[shape], rules, options)
