"""Limits of time that stand still while what they limit waits for its turn (`call_turns`).

    group ─▶ agents, tools, judges ─▶ calls under a limit: each waits for its turn, then begins

A call is a part of what made it. What has parts waits while all of them wait, so a limit goes on
while anything in it is known to work, and what holds a turn is always limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Self

AGENT: ContextVar[str] = ContextVar("agent", default="")
"""The name, GID/INDEX, by which the requests of an agent's sessions find its limit."""

_WITHIN: ContextVar[LimitedWork | None] = ContextVar("work", default=None)
_NAMED: dict[str, LimitedWork] = {}


class LimitedWork:
    """The work of a `with` block; `end` is called once it has worked for `limit_s` seconds.

    `is_waiting`: until `begin`. `request`: of an engine, for which the work of its agent or group,
    with that `name`, waits. By default, it is a part of the work around it.
    """

    def __init__(
        self,
        limit_s: float = 0.0,
        end: Callable[[], object] | None = None,
        name: str = "",
        *,
        is_waiting: bool = False,
        request: str = "",
    ) -> None:
        while request and request not in _NAMED:
            request = request.rpartition("/")[0]
        self._whole = _NAMED.get(request) or _WITHIN.get()
        self._parts = set[LimitedWork]()
        self._is_waiting = is_waiting
        self._left_s, self._end, self._name = limit_s, end, name
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._name:
            _NAMED[self._name] = self
        if self._whole:
            self._whole._parts.add(self)
        self._token = _WITHIN.set(self)
        self._changed()
        return self

    def __exit__(self, *_: object) -> None:
        _WITHIN.reset(self._token)
        self._end = None
        if self._timer:
            self._timer.cancel()
        if _NAMED.get(self._name) is self:
            del _NAMED[self._name]
        if self._whole:
            self._whole._parts.discard(self)
            self._whole._changed()

    def begin(self) -> None:
        self._is_waiting = False
        self._changed()

    @property
    def left_s(self) -> float:
        """Return the seconds that it may still work, also after its block."""
        loop = asyncio.get_running_loop()
        return self._timer.when() - loop.time() if self._timer else self._left_s

    @property
    def _waits(self) -> bool:
        return all(part._waits for part in self._parts) if self._parts else self._is_waiting

    def _changed(self) -> None:
        """Stop the limit if this work waits now, else let it go on; then that of the whole."""
        waits, timer = self._waits, self._timer
        if timer and waits and self.left_s > 0:  # it is not over
            self._left_s, self._timer = self.left_s, None
            timer.cancel()
        elif self._end and not timer and not waits:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._end)
        if self._whole:
            self._whole._changed()


@asynccontextmanager
async def timeout(limit_s: float) -> AsyncIterator[LimitedWork]:
    """Raise TimeoutError out of a block that has worked for `limit_s` seconds."""
    async with asyncio.timeout(None) as limit:
        with LimitedWork(limit_s, partial(limit.reschedule, 0.0), AGENT.get()) as work:
            yield work
