"""Call a user's function in this process: it may raise anything, or never return.

A coroutine function runs in the event loop, any other in a thread. A thread cannot be ended: one
over its limit is abandoned, up to `MOST_ABANDONED`. So only inline functions, and those without an
import path, are called here.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from buffer.errors import ProcessUnavailable, RolloutMQError, describe
from buffer.wire.own_copy import readers_copy
from producer_workers.user_code.border import Border, Failure, Rules, is_of_this_project
from producer_workers.work_time import timeout

TURNS = 4  # calls of one function that run in threads at once, by default

# Threads of one function over its limit that still run; with more, it is not called.
MOST_ABANDONED = 64


class CallOutcome(NamedTuple):
    """How a call ended. As a value: a future cannot carry StopIteration, a task no SystemExit."""

    result: Any = None
    error: BaseException | None = None


_Work = tuple[asyncio.AbstractEventLoop, Callable[[], Any], Callable[[CallOutcome], None]]


def attempt(call: Callable[[], Any]) -> CallOutcome:
    try:
        return CallOutcome(call())
    except BaseException as error:  # also SystemExit: it is the user's, and ends this call only
        return CallOutcome(error=error)


class _Caller:
    """A thread that makes one call after the other. It does not keep its process from ending."""

    def __init__(self, what: str) -> None:
        self._work = SimpleQueue[_Work]()
        threading.Thread(target=self._make_calls, name=what, daemon=True).start()

    def start(
        self, call: Callable[[], Any], then: Callable[[_Caller], None]
    ) -> asyncio.Future[CallOutcome]:
        """Return the future of the outcome of `call`. `then` gets this thread once it is free."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallOutcome] = loop.create_future()

        def resolve(outcome: CallOutcome) -> None:
            then(self)
            if not future.done():
                future.set_result(outcome)

        self._work.put((loop, call, resolve))
        return future

    def _make_calls(self) -> None:
        while True:
            loop, call, resolve = self._work.get()
            outcome = attempt(call)
            with suppress(RuntimeError):  # the loop was closed, and the caller with it
                loop.call_soon_threadsafe(resolve, outcome)
            del call, resolve, outcome  # not kept until the next call


async def outcome_of(call: Callable[[], Awaitable[Any]]) -> CallOutcome:
    try:
        return CallOutcome(await call())
    except BaseException as error:  # also SystemExit, which would end the event loop
        return CallOutcome(error=error)


class UserFunction:
    """Calls `function`, of the kind of `border`, by `rules`; `turns` calls at once in threads."""

    def __init__(self, function: Any, border: Border, rules: Rules, *, turns: int = TURNS) -> None:
        self._function = function
        self._is_ours = callable(function) and is_of_this_project(function)
        self._border = border
        self._rules = rules
        self._most = turns + MOST_ABANDONED
        self._turns = asyncio.Semaphore(turns)
        self._threads = 0
        self._idle: list[_Caller] = []

    async def __call__(self, *arguments: Any, again: Any = None) -> Any:
        """Return its result. No call here is repeated, so `again` is not called.

        Raises the rules' error; ProcessUnavailable if too many calls hang.
        """
        call = self._prepared(arguments)
        if self._rules.mode == "coroutines":
            return self._checked(await self._in_loop(call), arguments)
        outcome = await self._settled(await self._in_turn(call))
        return self._checked(outcome, arguments)

    async def call_each(self, calls: Sequence[tuple[Any, ...]]) -> list[CallOutcome]:
        """Make calls of a plain function, one after the other on one thread; return their outcomes.

        Raises the rules' error if they take longer than one call may.
        """
        prepared = list(map(self._prepared, calls))
        made = await self._in_turn(lambda: [attempt(call) for call in prepared])
        outcomes = []
        for outcome, arguments in zip(made.result, calls, strict=True):
            if inspect.isawaitable(outcome.result):
                settled = await outcome_of(partial(self._settled, outcome))
                outcome = settled.result or settled
            outcomes.append(attempt(partial(self._checked, outcome, arguments)))
        return outcomes

    def _prepared(self, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        given = arguments if self._is_ours else map(readers_copy, arguments)
        return partial(self._border.call, self._function, *given)

    def close(self) -> None:
        """Do nothing: its threads cannot be ended."""

    def _checked(self, outcome: CallOutcome, arguments: tuple[Any, ...]) -> Any:
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

    async def _settled(self, outcome: CallOutcome) -> CallOutcome:
        """Await what a plain function returned: a lambda around a coroutine function does that."""
        if outcome.error is not None or not inspect.isawaitable(outcome.result):
            return outcome
        return await self._in_loop(lambda: outcome.result)

    async def _in_loop(self, call: Callable[[], Any]) -> CallOutcome:
        async def settle() -> Any:
            made = call()
            return await made if inspect.isawaitable(made) else made

        return await self._limited(asyncio.ensure_future(outcome_of(settle)))

    async def _in_turn(self, call: Callable[[], Any]) -> CallOutcome:
        await self._turns.acquire()
        work = asyncio.ensure_future(self._in_thread(call))
        work.add_done_callback(self._end_turn)
        # a thread whose result is not wanted any more still has its turn
        return await asyncio.shield(work)

    def _end_turn(self, work: asyncio.Future[CallOutcome]) -> None:
        self._turns.release()
        if not work.cancelled():
            work.exception()  # retrieved here, as its caller may be gone

    async def _in_thread(self, call: Callable[[], Any]) -> CallOutcome:
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

    async def _limited(self, work: asyncio.Future[CallOutcome]) -> CallOutcome:
        try:
            async with timeout(self._rules.limit_s):
                await asyncio.wait({work})
        except TimeoutError:
            raise self._rules.over_limit() from None
        finally:
            work.cancel()  # not awaited: it may ignore that
        return work.result()


# These end an event loop. A worker handles a real Ctrl-C as a signal.
_ENDS = (SystemExit, KeyboardInterrupt)


class UserExit(RolloutMQError):
    """The code of a loop, an environment or an agent called sys.exit."""

    @classmethod
    def of(cls, error: BaseException) -> UserExit:
        return cls(describe(error), hint="raise another error: this one would end the worker")


class _Contained(Coroutine[Any, Any, Any]):
    """A task's coroutine that raises UserExit where `inner` raises one of `_ENDS`.

    GeneratorExit of what it awaits would close it, frame by frame, so it becomes a UserExit, too.
    """

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except _ENDS as exit:
            raise UserExit.of(exit) from exit

    def throw(self, *error: Any) -> Any:
        try:
            if isinstance(error[0], GeneratorExit):
                return self._inner.throw(UserExit.of(error[0]))
            return self._inner.throw(*error)
        except _ENDS as exit:
            raise UserExit.of(exit) from exit

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Contain `_ENDS` in every task that `loop` starts from now on."""

    def start(loop: asyncio.AbstractEventLoop, inner: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Contained(inner), loop=loop, **options)

    if loop.get_task_factory() is None:
        loop.set_task_factory(start)
