"""Keep SystemExit out of a worker's event loop.

asyncio ends the loop with a SystemExit that any of its tasks raises, also one that the code of an
agent loop or an environment has started. Here it ends that task only, as an error of its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from buffer.errors import RolloutMQError


class UserExit(RolloutMQError):
    """The code of a loop, an environment or an agent called sys.exit."""


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises UserExit where `inner` raises SystemExit."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except SystemExit as error:
            raise _refusal(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except SystemExit as exit:
            raise _refusal(exit) from exit

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Contain SystemExit in every task that `loop` starts from now on."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    return asyncio.Task(_Contained(coroutine), loop=loop, **options)


def _refusal(error: SystemExit) -> UserExit:
    return UserExit(
        f"SystemExit({error.code!r})", hint="raise another error: sys.exit would end the worker"
    )
