"""Keep SystemExit, KeyboardInterrupt and GeneratorExit of a user's code out of an event loop.

asyncio ends the loop with one that any of its tasks raises, also a task that the code of an agent
loop or an environment has started. Here it ends that task only, as an error of its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, cast

from buffer.errors import RolloutMQError, describe

_ENDS = (SystemExit, KeyboardInterrupt)
"""What ends an event loop. A real Ctrl-C is a signal, which a worker handles otherwise."""


class UserExit(RolloutMQError):
    """The code of a loop, an environment or an agent called sys.exit."""


class Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises UserExit where `inner` raises what would end more than itself."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except (*_ENDS, GeneratorExit) as error:  # nobody has closed it: that is not a `send`
            raise _refusal(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except _ENDS as exit:
            raise _refusal(exit) from exit

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return cast("Generator[Any, Any, Any]", self)

    def __iter__(self) -> Contained:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Contain both in every task that `loop` starts from now on."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    return asyncio.Task(Contained(coroutine), loop=loop, **options)


def _refusal(error: BaseException) -> UserExit:
    return UserExit(describe(error), hint="raise another error: this one would end the worker")
