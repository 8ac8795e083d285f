"""Run a user's function for the process that started this one (process_function.py).

A frame is a call number, a length, and that many bytes: the arguments, or nothing to cancel the
call. The answer is a `CallAnswer`; number 0 ends the start, and later answers that calls can run.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import msgspec

from producer_workers.user_code.border import Border, Failure, Mode, load_border
from producer_workers.user_code.user_function import CallOutcome, attempt, contain_exits, outcome_of

HEADER = struct.Struct("<QQ")
READY = 0  # the number of the answer that ends the start; calls count from 1

LONGEST_ANSWER = 1 << 28  # bytes


class Order(TypedDict):
    path: str
    border: str
    options: dict[str, Any]
    name: str
    memory_mb: int
    mode: Mode
    parent: int
    fd: int


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The end of a call: what its border's `check` returned, or why there is no result."""

    result: Any = None
    failure: Failure | None = None


def main(order: Order) -> None:
    """Serve until the caller closes the connection, or ends."""
    end_with_parent(order["parent"])
    connection = socket.socket(fileno=order["fd"])
    border = load_border(order["border"])
    try:
        function = border.load(order["path"], order["options"])
        if order["memory_mb"]:
            limit_memory(order["memory_mb"])  # after the imports, which are not the function's
    except BaseException as error:  # the module of a user may raise anything while it is imported
        connection.sendall(_frame(READY, border, CallOutcome(error=error)))
        raise
    connection.sendall(_frame(READY, border, CallOutcome()))
    server = _Server(order["name"], border, function)
    if order["mode"] == "coroutines":
        asyncio.run(server.serve_coroutines(connection))
    elif order["mode"] == "threads":
        server.serve_threads(connection)
    else:
        server.serve_plain(connection)


class _Server:
    def __init__(self, name: str, border: Border, function: Callable[..., Any]) -> None:
        self._name = name
        self._border = border
        self._function = function
        self._sending = threading.Lock()

    def serve_plain(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                number, size = HEADER.unpack(header)
                self._answer(connection, number, stream.read(size))

    def serve_threads(self, connection: socket.socket) -> None:
        """Make each call in a thread of its own; one that is cancelled goes on."""
        with connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                number, size = HEADER.unpack(header)
                if number == READY:
                    self._send(connection, _frame(READY, self._border, CallOutcome()))
                elif size:
                    given = (connection, number, stream.read(size))
                    threading.Thread(target=self._answer, args=given, daemon=True).start()

    def _answer(self, connection: socket.socket, number: int, data: bytes) -> None:
        outcome = attempt(partial(self._call, data))
        self._send(connection, _frame(number, self._border, outcome))

    def _send(self, connection: socket.socket, frame: bytes) -> None:
        with self._sending:
            connection.sendall(frame)

    def _call(self, data: bytes) -> Any:
        arguments = self._border.read(data)
        result = self._border.call(self._function, *arguments)
        if inspect.isawaitable(result):  # as a function that wraps a coroutine function returns
            result = asyncio.run(_awaited(result))
        return self._border.check(self._name, result, *arguments)

    async def serve_coroutines(self, connection: socket.socket) -> None:
        contain_exits(asyncio.get_running_loop())
        reader, writer = await asyncio.open_connection(sock=connection)
        calls: dict[int, asyncio.Task[None]] = {}

        async def answer(number: int, data: bytes) -> None:
            outcome = await outcome_of(partial(self._call_async, data))
            writer.write(_frame(number, self._border, outcome))
            calls.pop(number, None)

        with suppress(asyncio.IncompleteReadError):
            while True:
                number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                if number == READY:
                    writer.write(_frame(READY, self._border, CallOutcome()))
                elif size:
                    data = await reader.readexactly(size)
                    calls[number] = asyncio.create_task(answer(number, data))
                elif call := calls.get(number):
                    call.cancel()

    async def _call_async(self, data: bytes) -> Any:
        arguments = self._border.read(data)
        result = self._border.call(self._function, *arguments)
        if inspect.isawaitable(result):
            result = await result
        return self._border.check(self._name, result, *arguments)


async def _awaited(made: Any) -> Any:
    return await made


def _frame(number: int, border: Border, outcome: CallOutcome) -> bytes:
    try:
        data = _encoded(border, outcome)
    except Exception as error:  # what a function returns may be anything
        data = _encoded(border, CallOutcome(error=TypeError(f"its result cannot be sent: {error}")))
    return HEADER.pack(number, len(data)) + data


def _encoded(border: Border, outcome: CallOutcome) -> bytes:
    if outcome.error is not None:
        return msgspec.msgpack.encode(CallAnswer(failure=Failure.of(outcome.error, border)))
    data = msgspec.msgpack.encode(CallAnswer(outcome.result))
    if len(data) > LONGEST_ANSWER:
        raise ValueError(f"it has {len(data)} bytes, and at most {LONGEST_ANSWER} are sent")
    return data


def limit_memory(memory_mb: int) -> None:
    """Limit the address space of this process, and write no core file."""
    lower(resource.RLIMIT_AS, memory_mb * 2**20)
    lower(resource.RLIMIT_CORE, 0)


def lower(limit: int, value: int) -> None:
    """Set a limit to `value`, or to what is allowed."""
    _, hard = resource.getrlimit(limit)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (most, most))


def end_with_parent(parent: int) -> None:
    """Have the kernel (Linux only) kill this process when `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
