"""A judge made of one function, the user's or one of ours.

The function is called as `function(response=..., ground_truth=..., state=...)` and returns a number or a
dict of numbers with "score". A coroutine function runs in the event loop; any other in a thread, because a
slow verifier in the loop would hold up every generation of the worker.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from buffer.errors import JudgeError
from buffer.rollout import RolloutState
from producer_workers.judges.judge import check_reward

_THREADS = 4


class FunctionJudge:
    """Judges with `function`; its threads are its own, so that it can only starve itself."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"judge-{name}")

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """The checked reward. Raises JudgeError with the judge's name and what it raised."""
        try:
            result = await self._call(state)
        except Exception as error:
            message = f"judge {self.name!r} raised {type(error).__name__}: {error}"
            raise JudgeError(message, hint="the rollout it was given is in the dead letter") from error
        return check_reward(self.name, result)

    async def _call(self, state: RolloutState) -> Any:
        call = partial(self._function, response=state.response, ground_truth=state.ground_truth, state=state)
        if inspect.iscoroutinefunction(self._function):
            return await call()
        result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        return await result if inspect.isawaitable(result) else result
