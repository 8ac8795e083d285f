"""Judge with one Python function, the user's or a built-in one.

It is called as `function(response=..., ground_truth=..., state=...)` and returns a number or a dict
of numbers with "score", beside which it may return token columns (`TOKEN_COLUMNS`). One that sees
whole groups, to rank them for example, is called as `function(states=[...])` and returns one reward
for each rollout, in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from buffer.config.sections.task import JudgingSection
from buffer.rollouts.rollout import RolloutState
from producer_workers.judges.token_columns import take_columns
from producer_workers.user_code.checked_result import check_answer, check_answers
from producer_workers.user_code.process_function import ProcessFunction
from producer_workers.user_code.user_function import Shape, UserFunction

LIMIT_S: float = JudgingSection().timeout_s

Call = Callable[[Sequence[RolloutState]], Awaitable[Any]]
"""Calls a user's function for rollouts, here or in another process. Raises JudgeError only."""


class _Single:
    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self._call = call

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the checked reward. Raises JudgeError with the judge's name and what it raised."""
        answer = check_answer(self.name, await self._call([state]))
        return take_columns(self.name, state, answer)


class _Group:
    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self._call = call

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """See `GroupJudge`."""
        answers = check_answers(self.name, await self._call(states), len(states))
        return [take_columns(self.name, *pair) for pair in zip(states, answers, strict=True)]


class FunctionJudge(_Single):
    """Judges single rollouts with `function`, in this process; `limit_s` limits each call."""

    def __init__(self, name: str, function: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
        super().__init__(name, UserFunction(_what(name), function, "rollout", limit_s))


class GroupFunctionJudge(_Group):
    """Judges whole groups with `function`, in this process; `limit_s` limits each call."""

    def __init__(self, name: str, function: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
        super().__init__(name, UserFunction(_what(name), function, "group", limit_s))


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
    return ProcessFunction(path, shape, _what(name), name, judging, is_coroutine=is_coroutine)
