"""Run a user's function for the worker that started this process (process_function.py).

A frame is a header, call number and length, and that many bytes. The worker sends a group in the
wire format, or an empty frame that cancels its call. The answer is JSON: {"result": …} or
{"error": …, "hint": …, "is_last": whether this process is to be replaced}. The first answer,
number 0, is the end of the start.

A plain function is called in the main thread, one call after the other. The calls of a coroutine
function run at the same time.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

import orjson

from buffer.errors import RolloutMQError
from buffer.model.dotted_path import load_object
from buffer.rollouts.wire import decode
from producer_workers.user_code.checked_result import checked
from producer_workers.user_code.process_limits import end_with_parent, limit_memory
from producer_workers.user_code.user_function import Outcome, Shape, attempt, call_with, outcome_of

HEADER = struct.Struct("<QQ")
READY = 0
"""The number of the answer that ends the start; calls count from 1."""


class Order(TypedDict):
    """What a worker asks of such a process."""

    path: str
    shape: Shape
    what: str
    name: str
    memory_mb: int
    sandbox: str | None
    """an argument of the judge that runs programs, which alone has one"""
    parent: int
    fd: int


def main(order: Order) -> None:
    """Serve until the worker closes the connection, or ends."""
    end_with_parent(order["parent"])
    connection = socket.socket(fileno=order["fd"])
    try:
        function = load_object(order["path"], kind="function")
        if order["sandbox"] is not None:
            function = partial(function, sandbox=order["sandbox"])
        limit_memory(order["memory_mb"])  # after the imports, which are not the function's
    except BaseException as error:  # the module of a user may raise anything while it is imported
        connection.sendall(_frame(READY, order, Outcome(error=error)))
        raise
    connection.sendall(_frame(READY, order, Outcome()))
    server = _Server(order, function)
    if inspect.iscoroutinefunction(function):
        asyncio.run(server.serve_coroutines(connection))
    else:
        server.serve_plain(connection)


class _Server:
    def __init__(self, order: Order, function: Callable[..., Any]) -> None:
        self._order = order
        self._function = function

    def serve_plain(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                number, size = HEADER.unpack(header)
                call = partial(self._call, stream.read(size))
                connection.sendall(_frame(number, self._order, attempt(self._order["what"], call)))

    def _call(self, data: bytes) -> Any:
        states = decode(data).states
        result = call_with(self._function, self._order["shape"], states)
        if inspect.isawaitable(result):  # as a function that wraps a coroutine function returns
            result = asyncio.run(_awaited(result))
        return checked(self._order["shape"], self._order["name"], result, len(states))

    async def serve_coroutines(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        calls: dict[int, asyncio.Task[None]] = {}

        async def answer(number: int, data: bytes) -> None:
            call = partial(self._call_async, data)
            outcome = await outcome_of(self._order["what"], call)
            writer.write(_frame(number, self._order, outcome))
            calls.pop(number, None)

        while header := await reader.read(HEADER.size):
            number, size = HEADER.unpack(header + await _rest(reader, HEADER.size - len(header)))
            if size:
                data = await reader.readexactly(size)
                calls[number] = asyncio.create_task(answer(number, data))
            elif call := calls.get(number):
                call.cancel()

    async def _call_async(self, data: bytes) -> Any:
        states = decode(data).states
        result = await call_with(self._function, self._order["shape"], states)
        return checked(self._order["shape"], self._order["name"], result, len(states))


async def _rest(reader: asyncio.StreamReader, size: int) -> bytes:
    return await reader.readexactly(size) if size else b""


async def _awaited(made: Any) -> Any:
    return await made


def _frame(number: int, order: Order, outcome: Outcome) -> bytes:
    try:
        answer = {"result": outcome.unwrap(order["what"])}
    except RolloutMQError as error:
        is_last = isinstance(outcome.error, MemoryError)
        answer = {"error": error.message, "hint": error.hint, "is_last": is_last}
    data = orjson.dumps(answer)
    return HEADER.pack(number, len(data)) + data
