"""Call a user's function in this process: it may raise anything, or never return.

A coroutine function runs in the event loop. Any other runs in a thread, since it would hold up
every generation of the worker in the loop. A thread cannot be ended: one that exceeds its limit is
abandoned, and another takes its turn, up to `MOST_ABANDONED` of them. Functions that may hang
belong into a process of their own.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

from buffer.errors import JudgeError
from buffer.rollouts.own_copy import readers_copy
from buffer.rollouts.rollout import RolloutState

TURNS = 4
"""Calls of one function that run in threads at once."""

MOST_ABANDONED = 8
"""Threads of one function that exceeded its limit and still run; with more, it is not called."""

LONGEST_REASON = 300
"""Characters of an exception's text in the reason of a failed group."""

USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What a user's code may raise of its own: sys.exit, too, must not end the worker."""

LAST_CALLS = deque[tuple[str, float, float]](maxlen=256)
"""The last calls in threads of this process: name, begin and end, in seconds of time.monotonic."""

Shape = Literal["rollout", "group", "filter"]
"""How a function is called: with one rollout, with `states`, or with the group as its argument."""


def call_with(function: Callable[..., Any], shape: Shape, states: Sequence[RolloutState]) -> Any:
    """Return what `function` returns for these rollouts."""
    if shape == "filter":
        return function(list(states))
    if shape == "group":
        return function(states=list(states))
    (state,) = states
    return function(response=state.response, ground_truth=state.ground_truth, state=state)


class Outcome(NamedTuple):
    """How a call ended. As a value: a future cannot carry StopIteration, a task no SystemExit."""

    result: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        """Return the result, or raise the error. For coroutines: it may be StopIteration."""
        if self.error is not None:
            raise self.error
        return self.result

    def unwrap(self, what: str) -> Any:
        """Return the result. Raises JudgeError that names `what` for an error."""
        if self.error is None:
            return self.result
        if isinstance(self.error, JudgeError):
            raise self.error
        raise JudgeError(
            f"{what} raised {describe(self.error)}", hint=_hint(self.error)
        ) from self.error


def describe(error: BaseException) -> str:
    """Return an error in one line: its type and the start of its text."""
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    name = type(error).__name__
    return f"{name}: {text[:LONGEST_REASON]}" if text else name


def _hint(error: BaseException) -> str:
    if isinstance(error, StopIteration):
        return "next(...) found nothing: give it a default"
    if isinstance(error, MemoryError):
        return "see [tasks.<name>.judging] memory_mb"
    return "see the rollout that it got in the dead letter"


def over_limit(what: str, limit_s: float) -> JudgeError:
    """Return the error of a call that took too long."""
    return JudgeError(
        f"{what} exceeded its limit of {limit_s:g} s",
        hint="raise [tasks.<name>.judging] timeout_s, or make it faster",
    )


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
    """Calls `function` for rollouts. Errors call it `what`; `limit_s` limits each call."""

    def __init__(
        self, what: str, function: Callable[..., Any], shape: Shape, limit_s: float
    ) -> None:
        self._what = what
        self._function = function
        self._shape = shape
        self._limit_s = limit_s
        self._turns = asyncio.Semaphore(TURNS)
        self._threads = 0
        self._idle: list[_Caller] = []

    async def __call__(self, states: Sequence[RolloutState]) -> Any:
        """Return its result. Raises JudgeError for anything that it raises, and after its limit."""
        call = partial(call_with, self._function, self._shape, list(map(readers_copy, states)))
        if inspect.iscoroutinefunction(self._function):
            return await self._in_loop(call)
        result = (await self._in_turn(call)).unwrap(self._what)
        # a plain function may return a coroutine, as a lambda around one does
        return await self._in_loop(lambda: result) if inspect.isawaitable(result) else result

    async def _in_loop(self, call: Callable[[], Awaitable[Any]]) -> Any:
        outcome = await self._limited(asyncio.ensure_future(outcome_of(self._what, call)))
        return outcome.unwrap(self._what)

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
            if self._threads >= TURNS + MOST_ABANDONED:
                raise JudgeError(
                    f"{self._what} still runs in {self._threads} threads, which cannot be ended",
                    hint='set [tasks.<name>.judging] kind = "process", which ends what hangs',
                )
            self._idle.append(_Caller(self._what))
            self._threads += 1
        # a thread that is over the limit comes back once its call ends
        return await self._limited(self._idle.pop().start(call, self._idle.append))

    async def _limited(self, work: asyncio.Future[Outcome]) -> Outcome:
        try:
            done, _ = await asyncio.wait({work}, timeout=self._limit_s)
        finally:
            work.cancel()  # not awaited: it may ignore that
        if not done:
            raise over_limit(self._what, self._limit_s)
        return work.result()
