"""One process that makes calls of a user's function, until it ends or is ended.

It starts by exec, never by fork, so it shares no engine and no device with its parent, and dies
with it. msgpack crosses over a socket pair, never pickle.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from typing import Any

import msgspec
import orjson

from buffer.errors import ProcessUnavailable
from producer_workers.follow_owner import how_ended, kill_session
from producer_workers.user_code.border import ROOM, Border, Rules
from producer_workers.user_code.function_server import HEADER, READY, CallAnswer, Order

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
    """One process, started by its first call; it makes several calls at once if it `is_shared`."""

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
            answer = self._send(number, frame)
            try:
                return self._result(await self._limited(number, answer))
            except asyncio.CancelledError:
                self._give_up(number)
                raise
        finally:
            self._calls -= 1
            self._leave_if_idle()

    async def _limited(self, number: int, answer: asyncio.Future[CallAnswer]) -> CallAnswer:
        done, _ = await asyncio.wait({answer}, timeout=self._rules.limit_s)
        if done:
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

    def _result(self, answer: CallAnswer) -> Any:
        failure = answer.failure
        self._failed_s = time.monotonic() if failure and failure.trace else math.inf
        if failure is not None:
            raise self._rules.failed(failure)
        return self._border.result(answer.result)
