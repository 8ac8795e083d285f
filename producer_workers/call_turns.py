"""Wait for turns under a limit that all processes share (`buffer.control.call_limit`).

    async with turns.turn(tokens) as turn:      # waits here; limits of time stand still meanwhile
        answer = await …
        turn.used(answer.tokens)                # or turn.refused(seconds, reason), after a 429

One asyncio task asks for the permits of all calls that wait. It ends when nothing waits and nothing
is held, and begins again with the next call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from buffer.control.call_limit import MOST_WANTED, Caller, CallerState, CallLimit
from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.redis.retry import LogOnce
from buffer.redis.store import Store
from producer_workers.work_time import LimitedWork

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")

BELL_S = 1.0  # longest wait of a thread for a wake-up, which delays the end of its process

_all: WeakSet[Turns] = WeakSet()


@dataclass(eq=False)
class CallTurn:
    """One call. `tokens`: those that it may use at most."""

    tokens: int
    begins: asyncio.Future[None]
    unused: int = 0
    reason: str = ""  # why the service refused the call; "": it did not
    pause_s: float = 0.0  # for how long the service then wants no call

    def used(self, tokens: int) -> None:
        self.unused = self.tokens - tokens

    def refused(self, pause_s: float, reason: str) -> None:
        """Make everybody wait: the service refused the call because of a limit of its own.

        They wait for `pause_s`, at least a second, and twice as long after each refusal in a row.
        """
        self.unused, self.pause_s, self.reason = self.tokens, pause_s, reason

    def begin(self, error: Exception | None = None) -> None:
        if not self.begins.done():
            self.begins.set_exception(error) if error else self.begins.set_result(None)


class Turns:
    """The turns of one flow's calls. Used on one event loop."""

    def __init__(self, store: Store, limit: CallLimit, flow: str, lease_ms: int) -> None:
        self.limit = limit
        self._caller = Caller(store, limit, flow, lease_ms)
        self._state = CallerState()
        self.waiting: deque[CallTurn] = deque()  # any thread may take its length
        self._changed = asyncio.Event()
        self._asks: asyncio.Task[None] | None = None
        self._bell: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=f"limit-{limit.name}")
        self._refusal = LogOnce(log, f"calls wait: {limit}", ended=f"calls go on: {limit}")
        self.refused_at: float | None = None
        """monotonic time since which the service has refused every call; any thread may read it"""
        _all.add(self)

    @asynccontextmanager
    async def turn(self, tokens: int = 0, request: str = "") -> AsyncIterator[CallTurn]:
        """Wait for the turn of a call that uses at most `tokens`; `request`: see `LimitedWork`.

        Raises RolloutMQError for a call with more tokens than the quota of a minute.
        """
        if 0 < self.limit.tokens_per_minute < tokens:
            raise RolloutMQError(
                f"a call of {tokens} tokens cannot be made under the limit {self.limit}",
                hint="shorten what is asked, or raise tokens_per_minute",
            )
        turn = CallTurn(tokens, asyncio.get_running_loop().create_future())
        self.waiting.append(turn)
        self._ask_soon()
        with LimitedWork(is_waiting=True, request=request) as call:
            try:
                await turn.begins
                call.begin()
                yield turn
            finally:
                self._end(turn)

    def _end(self, turn: CallTurn) -> None:
        if turn in self.waiting:
            self.waiting.remove(turn)
            self._changed.set()
            return
        state = self._state
        state.ended += 1
        state.unused += turn.tokens if turn.begins.cancelled() else turn.unused
        if turn.reason:
            state.refused += 1
            state.pause_ms = round(1000 * turn.pause_s)
            self.refused_at = self.refused_at or time.monotonic()
            self._refusal.report("refused", turn.reason)
        elif not turn.begins.cancelled():
            self.refused_at = None
            self._refusal.report("")
        self._ask_soon()

    def _ask_soon(self) -> None:
        self._changed.set()
        if self._asks is None or self._asks.done():
            self._asks = asyncio.create_task(self._ask_all(), name=f"limit {self.limit.name}")

    async def _ask_all(self) -> None:
        """Ask for permits, and let calls begin, until nothing waits and nothing is held."""
        again_s = 0.0
        while again_s or self._changed.is_set():
            self._changed.clear()
            state, wanted = replace(self._state), [turn.tokens for turn in self.waiting]
            ask = partial(self._caller.ask, state, wanted[:MOST_WANTED])
            try:
                again_s, delays_s = await self._in_thread(ask)
            except StoreUnavailable:  # the calls wait, as all that needs the server
                again_s, delays_s = BELL_S, []
            except RolloutMQError as error:  # no repetition helps
                for turn in self.waiting:
                    turn.begin(error)
                return
            for delay_s in delays_s:
                self._state.known += 1
                if self.waiting:
                    asyncio.get_running_loop().call_later(delay_s, self.waiting.popleft().begin)
                else:  # cancelled while the question was under way
                    self._state.ended += 1
                    self._changed.set()
            if self.waiting and (self._bell is None or self._bell.done()):
                self._bell = asyncio.create_task(self._listen())
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._changed.wait()

    async def _listen(self) -> None:
        """While calls wait, ask again when the bell rings."""
        with suppress(StoreUnavailable):  # then it begins again after the next question
            while self.waiting:
                if await self._in_thread(partial(self._caller.wait, BELL_S)):
                    self._changed.set()

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call)


def reported() -> dict[str, Any]:
    """Return the fields of a heartbeat about calls of this process that wait."""
    now = time.monotonic()
    waits = [
        (now - (each.refused_at or now), len(each.waiting), str(each.limit))
        for each in list(_all)
        if each.waiting
    ]
    refused_s, _, limit = max(waits, default=(0.0, 0, ""))
    return {
        "quota_waits": sum(calls for _, calls, _ in waits),
        "quota": limit.replace(" ", "+"),
        "quota_refused_ms": round(1000 * refused_s),
    }
