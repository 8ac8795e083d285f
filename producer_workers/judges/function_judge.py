"""Judge with one Python function, the user's or a built-in one.

It is called as `function(response=..., ground_truth=..., state=...)` and returns a number or a dict
of numbers with "score". One that sees whole groups, to rank them for example, is called as
`function(states=[...])` and returns one reward for each rollout, in order.

A coroutine function runs in the event loop, any other in a thread of its judge's own: a slow
verifier in the loop would hold up every generation of the worker.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from buffer.errors import JudgeError
from buffer.model.rollout import RolloutState
from producer_workers.judges.judge import check_reward

_THREADS = 4


class GroupFunctionJudge:
    """Judges whole groups with `function`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
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
            raise JudgeError(
                message, hint="see the group that it got in the dead letter"
            ) from error
        return check_rewards(self.name, results, len(states))


def check_rewards(name: str, results: Any, count: int) -> list[dict[str, float]]:
    """Return `results` of judge `name` as rewards of `count` rollouts. Raises JudgeError."""
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != count:
        raise JudgeError(
            f"judge {name!r} returned {results!r:.80}", hint=f"return a list of {count} rewards"
        )
    return [check_reward(name, result) for result in results]


class FunctionJudge:
    """Judges single rollouts with `function`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"judge-{name}")

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the checked reward. Raises JudgeError with the judge's name and what it raised."""
        try:
            result = await self._call(state)
        except Exception as error:
            message = f"judge {self.name!r} raised {type(error).__name__}: {error}"
            raise JudgeError(
                message, hint="see the rollout that it got in the dead letter"
            ) from error
        return check_reward(self.name, result)

    async def _call(self, state: RolloutState) -> Any:
        call = partial(
            self._function, response=state.response, ground_truth=state.ground_truth, state=state
        )
        if inspect.iscoroutinefunction(self._function):
            return await call()
        result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        # A plain function may return a coroutine, as a lambda around one does.
        return await result if inspect.isawaitable(result) else result
