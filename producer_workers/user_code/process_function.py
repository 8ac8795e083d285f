"""Call a user's function in processes of this worker, which are killed if it hangs.

    call ──▶ a process with room, or a new one ──▶ answer
                 │ over its limit, or interrupted: a plain function's process is killed,
                 │                                 a coroutine is cancelled, or else killed
                 └ ended by itself (os._exit, a crash): each of its calls is repeated alone, in a
                   process of its own, since another may have ended it; the second end is its own

Processes are started by exec, never by fork, so they share no engine and no device with the worker.
Groups travel in the wire format and answers as JSON over a socket pair, never as pickle. The kernel
kills the processes with their worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import orjson

from buffer.config.sections.task import JUDGES, RUNS_PROGRAMS, JudgingSection
from buffer.errors import JudgeError, WireError
from buffer.rollouts.group import RolloutGroup
from buffer.rollouts.rollout import RolloutState
from buffer.rollouts.wire import encode
from producer_workers.user_code.function_server import HEADER, READY, Order
from producer_workers.user_code.user_function import Shape, over_limit

log = logging.getLogger("rolloutmq.worker")

START_S = 300.0
"""Time in which a process must have imported the function."""

CANCEL_S = 1.0
"""Time in which a coroutine that was cancelled must end, or else its process is killed."""

COROUTINES = 64
"""Calls of a coroutine function that run in one process at once."""

_BOOT = """
import json, sys
order, sys.path[:] = map(json.loads, sys.argv[1:])
from producer_workers.user_code.function_server import main
main(order)
"""


class _Ended(Exception):
    """A process ended with calls under way. Its text: how, for people."""


class ProcessFunction:
    """Calls the function at `path` in up to `judging.processes` processes.

    They are started when they are needed. `what`: as errors call it; `name`: as its judge is
    called; `is_coroutine`: whether a process runs several calls at once.
    """

    def __init__(
        self, path: str, shape: Shape, what: str, name: str, judging: JudgingSection,
        *, is_coroutine: bool,
    ) -> None:  # fmt: skip
        # here, as the config takes longer to import than all else that such a process needs
        takes_sandbox = path == JUDGES[RUNS_PROGRAMS].path
        self._order = Order(
            path=path, shape=shape, what=what, name=name, memory_mb=judging.memory_mb,
            sandbox=judging.sandbox if takes_sandbox else None, parent=os.getpid(), fd=-1,
        )  # fmt: skip
        self._what = what
        self._limit_s = judging.timeout_s
        self._room = COROUTINES if is_coroutine else 1
        self._turns = asyncio.Semaphore(judging.processes * self._room)
        self._alone = asyncio.Semaphore(judging.processes)
        self._processes: list[_Process] = []

    async def __call__(self, states: Sequence[RolloutState]) -> Any:
        """Return the checked result.

        Raises JudgeError for anything that the function does, and after its limit.
        """
        frame = _encode(self._what, states)
        async with self._turns:
            process = self._with_room()
            try:
                return await process.ask(frame)
            except _Ended:
                pass
        async with self._alone:
            process = self._start(is_shared=False)
            try:
                return await process.ask(frame)
            except _Ended as end:
                raise JudgeError(
                    f"{self._what} ended its process: {end}", hint="see the log of the worker"
                ) from end
            finally:
                process.end("its only call is over")

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end("the worker leaves")

    def _with_room(self) -> _Process:
        self._processes = [process for process in self._processes if not process.is_ended]
        found = next((each for each in self._processes if each.calls < self._room), None)
        if found is None:
            found = self._start(is_shared=self._room > 1)
            self._processes.append(found)
        return found

    def _start(self, *, is_shared: bool) -> _Process:
        return _Process(self._order, self._limit_s, is_shared=is_shared)


class _Process:
    """One process, which makes several calls at once if it `is_shared`.

    It is started by the first call, and ends with `end`, or by itself.
    """

    def __init__(self, order: Order, limit_s: float, *, is_shared: bool) -> None:
        self.calls = 0
        self.is_ended = False
        self._order = order
        self._limit_s = limit_s
        self._is_shared = is_shared
        self._numbers = count(READY + 1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, frame: bytes) -> Any:
        """Return the answer to one call. Raises JudgeError, and _Ended if the process ends."""
        self.calls += 1
        try:
            self._started = self._started or asyncio.create_task(self._start())
            await asyncio.shield(self._started)
            number = next(self._numbers)
            answer = self._send(number, frame)
            try:
                return _result(await self._limited(number, answer))
            except asyncio.CancelledError:
                self._give_up(number)
                raise
        finally:
            self.calls -= 1

    async def _limited(self, number: int, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        done, _ = await asyncio.wait({answer}, timeout=self._limit_s)
        if done:
            return answer.result()
        self._give_up(number)
        if self._is_shared:
            await asyncio.wait({answer}, timeout=CANCEL_S)
            if not answer.done():  # its event loop does not run: perhaps for another call's fault
                self.end("a call exceeded its limit and cannot be cancelled")
            if isinstance(answer.exception(), _Ended):
                answer.result()
        raise over_limit(self._order["what"], self._limit_s)

    def _give_up(self, number: int) -> None:
        """Cancel one call: a coroutine by a message, a plain function with its process."""
        if not self._is_shared:
            self.end("its call is not wanted any more")
        elif self._writer and not self.is_ended:
            self._writer.write(HEADER.pack(number, 0))

    def _send(self, number: int, frame: bytes) -> asyncio.Future[dict[str, Any]]:
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
        ours, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        ready = self._answers[READY] = asyncio.get_running_loop().create_future()
        with theirs:
            order = {**self._order, "fd": theirs.fileno()}
            # a plain child of this thread: a fork would share its engine, its locks and its device
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, orjson.dumps(order), orjson.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        done, _ = await asyncio.wait({ready}, timeout=START_S)
        if not done:
            raise JudgeError(f"{self._order['what']} was not imported within {START_S:g} s")
        _result(ready.result())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                answer = orjson.loads(await reader.readexactly(size))
                if future := self._answers.pop(number, None):
                    future.set_result(answer)
                if answer.get("is_last"):
                    self.end("it ran out of memory, which may be full of what it keeps")
        except (asyncio.IncompleteReadError, OSError):
            self.end("")

    def end(self, why: str) -> None:
        """Kill the process with its children, unless it has ended, and fail its calls."""
        if self.is_ended:
            return
        self.is_ended = True
        reason = _kill(self._process) if self._process else "it was not started"
        log.info("a process of %s ended: %s", self._order["what"], why or reason)
        if self._writer:
            self._writer.close()
        self._fail_calls(why or reason)

    def _fail_calls(self, reason: str) -> None:
        left = [answer for answer in self._answers.values() if not answer.done()]
        self._answers.clear()
        for answer in left:
            answer.set_exception(_Ended(reason))
            answer.exception()  # retrieved here, as its caller may be gone


def _kill(process: subprocess.Popen[bytes]) -> str:
    """End a process with its children, unless it has ended, and return how it ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()  # at once: it was killed
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _result(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise JudgeError(answer["error"], hint=answer["hint"])
    return answer["result"]


def _encode(what: str, states: Sequence[RolloutState]) -> bytes:
    """Return the rollouts as one group, without what no judge reads."""
    slim = [state.model_copy(update={"routed_experts": None}) for state in states]
    try:
        return encode(RolloutGroup("judged", "judged", slim))
    except WireError as error:
        raise JudgeError(f"{what} could not be asked: {error.message}", hint=error.hint) from error
