"""Call a user's function in processes of this one, which are killed if it hangs.

call ──▶ a process with room, or a new one ──▶ answer
             │ idle since a call that failed: a new process imports the code, which may be mended
             │ over its limit, or interrupted: a plain function's process is killed,
             │                                 a coroutine is cancelled, or else killed
             └ ended by itself (os._exit, a crash), or killed because nothing in it runs: each of
               its calls is repeated alone, in a process of its own, since another may be the
               cause; the second end is its own
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

import msgspec
import orjson

from buffer.errors import ProcessUnavailable, RolloutMQError
from producer_workers.follow_owner import how_ended, kill_session
from producer_workers.user_code.border import ROOM, Border, Rules, is_marked_inline, load_border
from producer_workers.user_code.function_server import HEADER, READY, CallAnswer, Order
from producer_workers.user_code.user_function import TURNS, UserFunction
from producer_workers.work_time import timeout

log = logging.getLogger("rolloutmq.worker")

MENDED_S = 5.0  # after a call that failed, until the user may have changed the code

# Processes that were ended for what a call did, by kind and name of their function.
REPLACED = Counter[str]()

_BOOT = """
import json, sys
order, sys.path[:] = map(json.loads, sys.argv[1:])
from producer_workers.user_code.function_server import main
main(order)
"""


class Ended(Exception):
    """A process ended with calls under way. Its text says how."""


class UserProcess:
    """One process, started by its first call; it makes several calls at once if it `is_shared`.

    It starts by exec, never by fork, so it shares no engine and no device with its parent, and dies
    with it. msgpack crosses over a socket pair, never pickle.
    """

    def __init__(self, order: Order, border: Border, rules: Rules, *, is_shared: bool) -> None:
        self.is_ended = False
        self._order = order
        self._border = border
        self._rules = rules
        self._is_shared = is_shared
        self._calls = 0
        self._failed_s = math.inf  # when its code raised in the last call, if it did
        self._unwanted = set[int]()
        self._is_leaving = False
        self._numbers = count(READY + 1)
        self._answers: dict[int, asyncio.Future[CallAnswer]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def room(self) -> int:
        if self.is_ended or self._is_leaving:
            return 0
        most = ROOM[self._rules.mode] if self._is_shared else 1
        return most - self._calls - len(self._unwanted)

    def end_if_mended(self) -> None:
        """End an idle process whose code raised a while ago: a new one imports mended code."""
        if not self._calls and time.monotonic() - self._failed_s > MENDED_S:
            self.end("its code raised, and may be mended", is_fault=False)

    async def ask(self, frame: bytes) -> Any:
        """Return the result of one call. Raises the rules' error, ProcessUnavailable, or Ended."""
        self._calls += 1
        try:
            self._started = self._started or asyncio.create_task(self._start())
            await asyncio.shield(self._started)
            number = next(self._numbers)
            try:
                answer = await self._limited(number, self._send(number, frame))
            except asyncio.CancelledError:
                self._give_up(number)
                raise
            failure = answer.failure
            self._failed_s = time.monotonic() if failure and failure.trace else math.inf
            if failure is not None:
                raise self._rules.failed(failure)
            return self._border.result(answer.result)
        finally:
            self._calls -= 1
            self._leave_if_idle()

    async def _limited(self, number: int, answer: asyncio.Future[CallAnswer]) -> CallAnswer:
        with suppress(TimeoutError):
            async with timeout(self._rules.limit_s):
                await asyncio.wait({answer})
        if answer.done():
            return answer.result()
        if not self._is_shared:
            self.end(f"a call exceeded its limit of {self._rules.limit_s:g} s")
            raise self._rules.over_limit()
        # another call may block the event loop, or hold the interpreter's lock
        sign = self._answers.get(READY) or self._send(READY, b"")
        await asyncio.wait({sign}, timeout=self._rules.grace_s)
        if not sign.done():
            self.end("a call blocks all others")
        if answer.done():
            return answer.result()
        self._give_up(number)
        if self._rules.mode == "coroutines":
            await asyncio.wait({answer}, timeout=self._rules.grace_s)
            if not answer.done():
                self.end("a call exceeded its limit and cannot be cancelled")
        else:
            self._is_leaving = True  # no other call should wait behind this one
        raise self._rules.over_limit()

    def _give_up(self, number: int) -> None:
        """Cancel one call: a coroutine by a message, a plain function with its process."""
        if self.is_ended:
            return
        if not self._is_shared:
            self.end("its call is not wanted any more", is_fault=False)
        elif self._writer and number in self._answers:
            self._writer.write(HEADER.pack(number, 0))
            self._unwanted.add(number)
            loop = asyncio.get_running_loop()
            loop.call_later(self._rules.grace_s, self._end_unwanted, number)

    def _end_unwanted(self, number: int) -> None:
        """End the process of an unwanted call that goes on; a process of threads, once idle."""
        if number not in self._unwanted or self.is_ended:
            return
        if self._rules.mode == "coroutines":
            self.end("a call that was cancelled goes on")
        else:
            self._is_leaving = True
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._is_leaving and not self._calls:
            self.end("a call that is not wanted any more goes on")

    def _send(self, number: int, frame: bytes) -> asyncio.Future[CallAnswer]:
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self.is_ended or self._writer is None:
            self._fail_calls("it had ended before the call")
        else:
            self._writer.write(HEADER.pack(number, len(frame)) + frame)
        return answer

    async def _start(self) -> None:
        try:
            await self._begin()
        except BaseException:
            self.end("it did not start")
            raise

    async def _begin(self) -> None:
        what = self._rules.what
        ours, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        ready = self._answers[READY] = asyncio.get_running_loop().create_future()
        with theirs:
            order = {**self._order, "fd": theirs.fileno()}
            try:
                # a plain child of this thread: a fork would share its engine, locks and device
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, orjson.dumps(order), orjson.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessUnavailable(
                    f"no process can be started for {what}: {error}"
                ) from error
        done, _ = await asyncio.wait({ready}, timeout=self._rules.start_s)
        if not done:
            raise ProcessUnavailable(f"{what} was not imported within {self._rules.start_s:g} s")
        try:
            failure = ready.result().failure
        except Ended as end:
            raise ProcessUnavailable(f"a process of {what} ended at its start: {end}") from end
        if failure is not None:
            message = f"{what} cannot be loaded in its process: {failure.said}"
            said = failure.said if failure.is_own else message
            raise ProcessUnavailable(said, hint=failure.hint)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(CallAnswer)
        try:
            while True:
                number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                answer = decoder.decode(await reader.readexactly(size))
                self._unwanted.discard(number)
                future = self._answers.pop(number, None)
                if future and not future.done():
                    future.set_result(answer)
                if answer.failure and answer.failure.is_out_of_memory:
                    self.end("it ran out of memory, which may be full of what it keeps")
        except (asyncio.IncompleteReadError, OSError):
            self.end("")
        except (msgspec.DecodeError, MemoryError):
            self.end("it sent what is no answer")

    def end(self, why: str, *, is_fault: bool = True) -> None:
        """Kill the process with its children, unless it has ended, and fail its calls."""
        if self.is_ended:
            return
        self.is_ended = True
        reason = "it was not started"
        if self._process:
            kill_session(self._process.pid)
            reason = how_ended(self._process.wait())  # at once: it was killed
        if is_fault:
            REPLACED[self._rules.what] += 1
        level = logging.WARNING if is_fault else logging.DEBUG
        log.log(level, "a process of %s was ended: %s", self._rules.what, why or reason)
        if self._writer:
            self._writer.close()
        self._fail_calls(why or reason)

    def _fail_calls(self, reason: str) -> None:
        left = [answer for answer in self._answers.values() if not answer.done()]
        self._answers.clear()
        self._unwanted.clear()
        for answer in left:
            answer.set_exception(Ended(reason))
            answer.exception()  # retrieved here, as its caller may be gone


# Calls a user's function, here or in another process. Raises the error of its rules only.
Call = Callable[..., Awaitable[Any]]

# Returns new arguments for a call that is repeated because its process ended.
Again = Callable[[], tuple[Any, ...]]

_OPEN = weakref.WeakSet["UserFunction | ProcessFunction"]()


class ProcessFunction:
    """Calls the function at `path`, of the kind of `border`, in processes that start when needed.

    `options`: arguments for `Border.load`.
    """

    def __init__(
        self, path: str, border: str, rules: Rules, options: Mapping[str, Any] | None = None
    ) -> None:
        self._border = load_border(border)
        self._rules = rules
        self._order = Order(
            path=path, border=border, options=dict(options or {}), name=rules.name,
            memory_mb=rules.memory_mb, mode=rules.mode, parent=os.getpid(), fd=-1,
        )  # fmt: skip
        self._turns = asyncio.Semaphore(rules.processes * ROOM[rules.mode])
        self._alone = asyncio.Semaphore(rules.processes)
        self._processes: list[UserProcess] = []

    async def __call__(self, *arguments: Any, again: Again | None = None) -> Any:
        """Return the checked result. `again` makes the arguments of a repeated call.

        Raises the rules' error for any fault of the function, and ProcessUnavailable if it cannot
        be called.
        """
        frame = self._write(arguments)
        async with self._turns:
            process = self._with_room()
            with suppress(Ended):
                return await process.ask(frame)
        async with self._alone:
            frame = self._write(again()) if again else frame
            process = UserProcess(self._order, self._border, self._rules, is_shared=False)
            try:
                return await process.ask(frame)
            except Ended as end:
                raise self._rules.ended(str(end)) from end
            finally:
                process.end("its only call is over", is_fault=False)

    def close(self) -> None:
        for process in self._processes:
            process.end("its calls are over", is_fault=False)

    def _write(self, arguments: tuple[Any, ...]) -> bytes:
        try:
            return self._border.write(*arguments)
        except (RolloutMQError, TypeError, ValueError, OverflowError, RecursionError) as error:
            hint = getattr(error, "hint", "")
            raise self._rules.error(
                f"{self._rules.what} could not be asked: {error}", hint=hint
            ) from error

    def _with_room(self) -> UserProcess:
        for process in self._processes:
            process.end_if_mended()
        self._processes = [process for process in self._processes if not process.is_ended]
        fitting = [process for process in self._processes if process.room > 0]
        found = max(fitting, key=lambda process: process.room, default=None)
        # another process starts from eight calls in one, up to the allowed number
        is_crowded = found is not None and found.room <= ROOM[self._rules.mode] - 8
        if found is None or (is_crowded and len(self._processes) < self._rules.processes):
            is_shared = ROOM[self._rules.mode] > 1
            found = UserProcess(self._order, self._border, self._rules, is_shared=is_shared)
            self._processes.append(found)
        return found


def call_of(
    function: Any,
    border: str,
    rules: Rules,
    *,
    path: str | None,
    options: Mapping[str, Any] | None = None,
    turns: int = TURNS,
) -> UserFunction | ProcessFunction:
    """Return what calls a user's function: in processes, which import it by `path`.

    Without a path, or if it is declared to run inline, it is called here, in up to `turns` threads.
    """
    if path is not None and not is_marked_inline(function):
        return ProcessFunction(path, border, rules, options)
    kind = load_border(border)
    return UserFunction(kind.prepare(function, options or {}), kind, rules, turns=turns)


class BlockingCall:
    """Calls a function from threads without an event loop: of a producer, or of submits."""

    def __init__(self, call: UserFunction | ProcessFunction) -> None:
        self._call = call
        _OPEN.add(call)
        weakref.finalize(self, _close, call).atexit = False  # see _settle

    def __call__(self, *arguments: Any) -> Any:
        async def ask() -> Any:
            return await self._call(*arguments)

        return asyncio.run_coroutine_threadsafe(ask(), _background_loop()).result()


def _close(call: UserFunction | ProcessFunction) -> None:
    _background_loop().call_soon_threadsafe(call.close)


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop in a thread that lives as long as this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="user-functions", daemon=True).start()
    atexit.register(_end, loop)
    return loop


def _end(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_settle(), loop).result(5.0)


async def _settle() -> None:
    """End all processes, and the tasks that read from them."""
    for call in list(_OPEN):
        call.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
