"""Call a user's function in this process: it may raise anything, or never return.

A coroutine function runs in the event loop. Any other runs in a thread, since it would hold up
every generation of the worker in the loop. A thread cannot be ended: one that exceeds its limit is
abandoned, and another takes its turn, up to `MOST_ABANDONED` of them. So only functions that are
declared to run inline are called here, and those that have no name to import them by.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from buffer.errors import ProcessUnavailable
from buffer.wire.own_copy import readers_copy
from producer_workers.user_code.border import Border
from producer_workers.user_code.rules import Failure, Rules

TURNS = 4
"""Calls of one function that run in threads at once, where nothing else is said."""

MOST_ABANDONED = 64
"""Threads of one function that exceeded its limit and still run; with more, it is not called."""

LAST_CALLS = deque[tuple[str, float, float]](maxlen=256)
"""The last calls in threads of this process: name, begin and end, in seconds of time.monotonic."""


class Outcome(NamedTuple):
    """How a call ended. As a value: a future cannot carry StopIteration, a task no SystemExit."""

    result: Any = None
    error: BaseException | None = None


def attempt(what: str, call: Callable[[], Any]) -> Outcome:
    """Return how the call of `what` ended."""
    began_s = time.monotonic()
    try:
        return Outcome(call())
    except BaseException as error:  # also SystemExit: it is the user's, and ends this call only
        return Outcome(error=error)
    finally:
        LAST_CALLS.append((what, began_s, time.monotonic()))


class _Caller:
    """A thread that makes one call after the other. It does not keep its process from ending."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._work = SimpleQueue[Callable[[], None]]()
        threading.Thread(target=self._make_calls, name=what, daemon=True).start()

    def start(
        self, call: Callable[[], Any], then: Callable[[_Caller], None]
    ) -> asyncio.Future[Outcome]:
        """Return the future of the outcome of `call`. `then` gets this thread once it is free."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()

        def resolve(outcome: Outcome) -> None:
            then(self)
            if not future.done():
                future.set_result(outcome)

        self._work.put(lambda: _post(loop, partial(resolve, attempt(self._what, call))))
        return future

    def _make_calls(self) -> None:
        while True:
            self._work.get()()


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop was closed, and the caller with it
        loop.call_soon_threadsafe(callback)


async def outcome_of(what: str, call: Callable[[], Awaitable[Any]]) -> Outcome:
    """Return how the coroutine of `what` ended."""
    try:
        return Outcome(await call())
    except BaseException as error:  # also SystemExit, which would end the event loop
        return Outcome(error=error)


class UserFunction:
    """Calls `function`, of the kind of `border`, by `rules`; `turns` calls at once in threads."""

    def __init__(self, function: Any, border: Border, rules: Rules, *, turns: int = TURNS) -> None:
        self._function = function
        self._border = border
        self._rules = rules
        self._most = turns + MOST_ABANDONED
        self._turns = asyncio.Semaphore(turns)
        self._threads = 0
        self._idle: list[_Caller] = []

    async def __call__(self, *arguments: Any) -> Any:
        """Return its result.

        Raises the rules' error for anything that it does, and ProcessUnavailable once too many of
        its calls hang.
        """
        own = map(readers_copy, arguments)
        call = partial(self._border.call, self._function, *own)
        if self._rules.mode == "coroutines":
            return self._checked(await self._in_loop(call), arguments)
        outcome = await self._in_turn(call)
        if outcome.error is None and inspect.isawaitable(outcome.result):
            # a plain function may return a coroutine, as a lambda around one does
            made = outcome.result
            outcome = await self._in_loop(lambda: made)
        return self._checked(outcome, arguments)

    def close(self) -> None:
        """Do nothing: its threads cannot be ended."""

    def _checked(self, outcome: Outcome, arguments: tuple[Any, ...]) -> Any:
        error = outcome.error
        if isinstance(error, ProcessUnavailable):  # of a tool that comes with this project
            raise error
        if error is None:
            try:
                plain = self._border.check(self._rules.name, outcome.result, *arguments)
                return self._border.result(plain)
            except Exception as fault:  # what it returned may be anything
                error = fault
        raise self._rules.failed(Failure.of(error, self._border)) from error

    async def _in_loop(self, call: Callable[[], Any]) -> Outcome:
        async def settle() -> Any:
            made = call()
            return await made if inspect.isawaitable(made) else made

        return await self._limited(asyncio.ensure_future(outcome_of(self._rules.what, settle)))

    async def _in_turn(self, call: Callable[[], Any]) -> Outcome:
        await self._turns.acquire()
        work = asyncio.ensure_future(self._in_thread(call))
        work.add_done_callback(self._end_turn)
        # a thread whose result is not wanted any more still has its turn
        return await asyncio.shield(work)

    def _end_turn(self, work: asyncio.Future[Outcome]) -> None:
        self._turns.release()
        if not work.cancelled():
            work.exception()  # retrieved here, as its caller may be gone

    async def _in_thread(self, call: Callable[[], Any]) -> Outcome:
        if not self._idle:
            if self._threads >= self._most:
                raise ProcessUnavailable(
                    f"{self._rules.what} still runs in {self._threads} threads, which cannot be "
                    "ended",
                    hint='let it run in a process, which is ended: give it as "module:function", '
                    "and do not declare it to run inline",
                )
            self._idle.append(_Caller(self._rules.what))
            self._threads += 1
        # a thread that is over the limit comes back once its call ends
        return await self._limited(self._idle.pop().start(call, self._idle.append))

    async def _limited(self, work: asyncio.Future[Outcome]) -> Outcome:
        try:
            done, _ = await asyncio.wait({work}, timeout=self._rules.limit_s)
        finally:
            work.cancel()  # not awaited: it may ignore that
        if not done:
            raise self._rules.over_limit()
        return work.result()
