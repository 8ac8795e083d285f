"""A judge of one function that sees all rollouts of a group at once: to rank them, say, or to ask for diversity.

The function is called as `function(states=[...])` and returns one reward for each, in their order.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from buffer.errors import JudgeError
from buffer.rollout import RolloutState
from producer_workers.judges.judge import check_reward

_THREADS = 4


class GroupFunctionJudge:
    """Judges with `function`: a coroutine function in the event loop, any other in a thread of this judge's own."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"judge-{name}")

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """See `GroupJudge`."""
        try:
            if inspect.iscoroutinefunction(self._function):
                results = await self._function(states=list(states))
            else:
                call = partial(self._function, states=list(states))
                results = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except Exception as error:
            message = f"judge {self.name!r} raised {type(error).__name__}: {error}"
            raise JudgeError(message, hint="the group it was given is in the dead letter") from error
        return check_rewards(self.name, results, len(states))


def check_rewards(name: str, results: Any, count: int) -> list[dict[str, float]]:
    """`results` of judge `name` as rewards of `count` rollouts. Raises JudgeError."""
    if isinstance(results, str | bytes) or not isinstance(results, Sequence) or len(results) != count:
        raise JudgeError(f"judge {name!r} returned {results!r:.80}", hint=f"return a list of {count} rewards")
    return [check_reward(name, result) for result in results]
