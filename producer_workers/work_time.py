"""Limits of time that stand still while what they limit waits for its turn (`call_turns`).

    group ─▶ agents, tools, judges ─▶ calls under a limit: each waits for its turn, then begins

A call is a part of what made it. What has parts waits while all of them wait, so a limit goes on
while anything in it is known to work, and what holds a turn is always limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

AGENT: ContextVar[str] = ContextVar("agent", default="")
"""The name, GID/INDEX, by which the requests of an agent's sessions find its limit."""

_WITHIN: ContextVar[Work | None] = ContextVar("work", default=None)
_NAMED: dict[str, Work] = {}


class Work:
    """`end` is called once this has worked for `left_s` seconds."""

    def __init__(self, whole: Work | None, *, is_waiting: bool = False) -> None:
        self._whole = whole
        self._parts = set[Work]()
        self._is_waiting = is_waiting
        self.left_s = 0.0
        self.end: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def going_on(self) -> Iterator[Work]:
        """Make whatever the block starts a part of this work."""
        if self._whole:
            self._whole._parts.add(self)
        token = _WITHIN.set(self)
        self._changed()
        try:
            yield self
        finally:
            _WITHIN.reset(token)
            self.end = None
            if self._timer:
                self._timer.cancel()
            if self._whole:
                self._whole._parts.discard(self)
                self._whole._changed()

    def begin(self) -> None:
        self._is_waiting = False
        self._changed()

    @property
    def _waits(self) -> bool:
        return all(part._waits for part in self._parts) if self._parts else self._is_waiting

    def _changed(self) -> None:
        """Stop the limit if this work waits now, else let it go on; then that of the whole."""
        loop = asyncio.get_running_loop()
        if self._timer and self._waits:
            self.left_s = self._timer.when() - loop.time()
            self._timer.cancel()
            self._timer = None
        elif self.end and not self._timer and not self._waits:
            self._timer = loop.call_later(self.left_s, self._expire)
        if self._whole:
            self._whole._changed()

    def _expire(self) -> None:
        end, self.end = self.end, None
        if end:
            end()


@contextmanager
def waiting_call(request: str = "") -> Iterator[Work]:
    """Enter a call that waits until `Work.begin`; `request`: of which engine request it is."""
    while request and request not in _NAMED:  # by its own agent, else by its group
        request = request.rpartition("/")[0]
    with Work(_NAMED.get(request) or _WITHIN.get(), is_waiting=True).going_on() as call:
        yield call


@contextmanager
def time_limit(limit_s: float, end: Callable[[], object], name: str = "") -> Iterator[None]:
    """Call `end` once the block has worked for `limit_s` seconds."""
    name = name or AGENT.get()
    work = Work(_WITHIN.get())
    work.left_s, work.end = limit_s, end
    if name:
        _NAMED[name] = work
    try:
        with work.going_on():
            yield
    finally:
        if _NAMED.get(name) is work:
            del _NAMED[name]


@asynccontextmanager
async def timeout(limit_s: float) -> AsyncIterator[None]:
    """Raise TimeoutError out of a block that has worked for `limit_s` seconds."""
    async with asyncio.timeout(None) as limit:
        with time_limit(limit_s, partial(limit.reschedule, 0.0)):
            yield


async def ends_within(limit_s: float, work: asyncio.Future[Any]) -> bool:
    """Wait for `work` for as long; return whether it has ended."""
    with suppress(TimeoutError):
        async with timeout(limit_s):
            await asyncio.wait({work})
    return work.done()
