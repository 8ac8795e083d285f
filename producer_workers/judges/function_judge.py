"""Judge with one Python function, the user's or a built-in one.

It is called as `function(response=..., ground_truth=..., state=...)` and returns a number or a dict
of numbers with "score". One that sees whole groups, to rank them for example, is called as
`function(states=[...])` and returns one reward for each rollout, in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from buffer.config.task import JudgingSection
from buffer.errors import JudgeError
from buffer.model.rollout import RolloutState
from producer_workers.judges.judge import check_reward
from producer_workers.judges.user_function import UserFunction

LIMIT_S: float = JudgingSection().timeout_s

Call = Callable[[Sequence[RolloutState]], Awaitable[Any]]
"""Calls a user's function for rollouts, here or in another process. Raises JudgeError only."""


def check_rewards(name: str, results: Any, count: int) -> list[dict[str, float]]:
    """Return `results` of judge `name` as rewards of `count` rollouts. Raises JudgeError."""
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != count:
        raise JudgeError(
            f"judge {name!r} returned {results!r:.80}", hint=f"return a list of {count} rewards"
        )
    return [check_reward(name, result) for result in results]


class FunctionJudge:
    """Judges single rollouts with `function`, in this process; `limit_s` limits each call."""

    def __init__(self, name: str, function: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
        self.name = name
        self._call: Call = UserFunction(f"judge {name!r}", function, "rollout", limit_s)

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the checked reward. Raises JudgeError with the judge's name and what it raised."""
        return check_reward(self.name, await self._call([state]))


class GroupFunctionJudge:
    """Judges whole groups with `function`, in this process; `limit_s` limits each call."""

    def __init__(self, name: str, function: Callable[..., Any], limit_s: float = LIMIT_S) -> None:
        self.name = name
        self._call: Call = UserFunction(f"judge {name!r}", function, "group", limit_s)

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """See `GroupJudge`."""
        return check_rewards(self.name, await self._call(states), len(states))
