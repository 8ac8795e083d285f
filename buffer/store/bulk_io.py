"""Payloads on their way to and from one server, without the copies that a client library makes of
them.

redis-py packs each command into one piece of memory, and hands every value out in another: most of
the time that a put or a take of payloads took went into copying, and into pages that the kernel has
to map for it (benchmarks/README.md). Here a value is sent from where it lies, and values are
received one behind the other into one array. Connections, time-outs and errors are the library's;
what is not plain values is left to it altogether.
"""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator, Sequence
from threading import Event
from typing import Any

import hiredis
import numpy as np
import redis
from redis.exceptions import ResponseError

log = logging.getLogger("rolloutmq.buffer")

Command = Sequence[str | int | float | bytes | memoryview]
"""Its name, a key, and the rest."""

Parts = list[memoryview | bytes | None]

_BYTES = (bytes, bytearray, memoryview)

_LARGE_BYTES = 4096
"""From here on, a value is sent by itself; smaller ones are cheaper to copy than to send apart."""

_LINE_BYTES = 64
"""Longer than what stands before a value."""

_PAGE_BYTES = 2 * 2**20
"""A large page of x86-64 and arm64."""

_SOON = struct.pack("@ll", 0, 200_000)
"""A timeval: 0.2 s, of which a round trip takes a few hundredths at most."""


def send(client: redis.Redis, commands: Iterable[Command]) -> list[Any]:
    """Run commands in one round trip; the answers as the server gives them, in order. Raises the
    first error.

    A command may be made when its turn comes: the server works on the ones before it meanwhile.
    """
    pool: Any = client.connection_pool
    connection = pool.get_connection()
    try:
        if not _is_real(connection):
            return pipelined(client, list(commands))
        sent = itertools.count()
        connection.send_packed_command(
            _packed(command for command, _ in zip(commands, sent, strict=False))
        )
        answers = [_answer(connection) for _ in range(next(sent))]
    except BaseException:
        connection.disconnect()  # an answer may still be under way
        raise
    finally:
        pool.release(connection)
    return _without_errors(answers)


def receive(
    client: redis.Redis,
    names: Sequence[Sequence[str]],
    sizes: Sequence[int],
    asked: Event | None = None,
) -> list[Parts]:
    """The values of several keys each, in one round trip. `sizes`: bytes of all values of each; 0:
    not known.

    Where all of them are there, they are one part, joined; else there is a None for each that is
    not. Parts are read-only, and share memory that is freed with the last of them. `asked` is
    called once the server was: from then on the kernel receives what is known to come, and other
    threads have the interpreter.
    """
    commands = [("GET", name) for keys in names for name in keys]
    pool: Any = client.connection_pool
    connection = pool.get_connection()
    try:
        if _is_real(connection):
            connection.send_packed_command(_packed(commands))
            inbox = _Inbox(connection._sock, sum(sizes) + _LINE_BYTES * len(commands))
            if asked:
                asked.set()
            if all(sizes):
                inbox.fill(sum(sizes))
            return [inbox.payload(len(keys)) for keys in names]
    except _NotAValue:
        connection.disconnect()
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    found = iter(pipelined(client, commands))
    return [[next(found) for _ in keys] for keys in names]


def _is_real(connection: Any) -> bool:
    return isinstance(getattr(connection, "_sock", None), socket.socket)


def pipelined(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    """Run commands in one round trip, by the client library. Raises the first error as the server
    said it: the library would put the command in front, and a whole payload with it.
    """
    pipe: Any = client.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    return _without_errors(pipe.execute(raise_on_error=False))


def _without_errors(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _packed(commands: Iterable[Command]) -> Iterator[bytes | bytearray | memoryview]:
    small = bytearray()
    for command in commands:
        if not any(isinstance(part, _BYTES) and len(part) >= _LARGE_BYTES for part in command):
            # in C: a script has some forty arguments
            plain: Any = tuple(
                bytes(part) if isinstance(part, _BYTES) else part for part in command
            )
            small += hiredis.pack_command(plain)
        else:
            small += b"*%d\r\n" % len(command)
            for part in command:
                data = part if isinstance(part, _BYTES) else str(part).encode()
                if len(data) < _LARGE_BYTES:
                    small += b"$%d\r\n%b\r\n" % (len(data), bytes(data))
                    continue
                yield small + b"$%d\r\n" % len(data)
                yield data
                small = bytearray(b"\r\n")
        if len(small) >= 2 * _LARGE_BYTES:
            # the server may begin with it while the next command is made
            yield small
            small = bytearray()
    yield small


def _large_pages(size: int) -> memoryview:
    """So many bytes. numpy asks the kernel for large pages from 4 MB on; from the beginning of one
    on, all of them are: a third of what the faults cost otherwise, half of what they cost where
    numpy begins (measured).
    """
    if size < _PAGE_BYTES:
        return np.empty(size, np.uint8).data
    memory = np.empty(size + _PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES
    return memory[start : start + size].data


class _NotAValue(Exception):
    """The server answered something else, probably an error: the library is asked again, and tells
    it.
    """


class _Inbox:
    """Memory into which answers are received, one behind the other.

    What is received lies in [0, _end), of which [_start, _end) was not looked at yet; the values of
    the payload that is being read are joined in [_base, _base + _joined).
    """

    def __init__(self, sock: Any, size: int) -> None:
        self._sock = sock
        self._memory = _large_pages(size)
        self._start = self._end = self._base = self._joined = 0

    def fill(self, count: int) -> None:
        """Receive `count` bytes in one call of the kernel; fewer if they do not come soon."""
        if isinstance(self._sock, ssl.SSLSocket):
            return  # it takes no flags
        timeout = self._sock.gettimeout()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SOON)
        self._sock.settimeout(None)
        try:
            self._receive(count, socket.MSG_WAITALL)
        except BlockingIOError:
            log.debug(
                "fewer than %s bytes came", count
            )  # a value is missing, or the server is busy: go on bit by bit
        finally:
            self._sock.settimeout(timeout)

    def payload(self, values: int) -> Parts:
        """The next `values` joined, or None for each that is missing."""
        self._joined = 0
        missing = 0
        for _ in range(values):
            size = self._size()
            if size is None:
                missing += 1
            else:
                self._join(size)
        whole = self._memory[self._base : self._base + self._joined].toreadonly()
        return [None] * missing if missing else [whole]

    def _join(self, size: int) -> None:
        while self._end < self._start + size + 2:
            self._more()
        if self._joined:
            target = self._base + self._joined
            self._memory[target : target + size] = self._memory[self._start : self._start + size]
        else:
            self._base = self._start
        self._joined += size
        self._start += size + 2

    def _size(self) -> int | None:
        """What the line before a value says; None: there is no value."""
        while True:
            head = bytes(self._memory[self._start : min(self._end, self._start + _LINE_BYTES)])
            line, is_whole, _ = head.partition(b"\r\n")
            if is_whole:
                break
            if len(head) == _LINE_BYTES:
                raise _NotAValue
            self._more()
        self._start += len(line) + 2
        if line in (b"$-1", b"_"):
            return None
        if not line.startswith(b"$"):
            raise _NotAValue
        return int(line[1:])

    def _more(self) -> None:
        if self._end == len(self._memory):
            self._grow()
        if not self._receive(len(self._memory) - self._end):
            raise redis.ConnectionError("Connection closed by server.")

    def _receive(self, count: int, flags: int = 0) -> int:
        try:
            received: int = self._sock.recv_into(self._memory[self._end :], count, flags)
        except BlockingIOError:
            raise
        except TimeoutError as error:
            raise redis.TimeoutError("Timeout reading from socket") from error
        except OSError as error:
            raise redis.ConnectionError(f"Error while reading from socket: {error}") from error
        self._end += received
        return received

    def _grow(self) -> None:
        """More memory than expected: what is not read to its end moves into a larger array."""
        kept = self._base if self._joined else self._start
        larger = _large_pages(2 * (self._end - kept) + _LARGE_BYTES)
        larger[: self._end - kept] = self._memory[kept : self._end]
        self._memory = larger
        self._base = 0
        self._start = self._start - kept
        self._end = self._end - kept
