"""Send commands and receive payloads without the copies that redis-py makes (benchmarks/README.md).

A value is sent from where it lies, and values are received into one array, one behind the other.
redis-py still provides connections, time-outs, errors and the types of answers.
"""

from __future__ import annotations

import logging
import mmap
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any

import hiredis
import numpy as np
import redis
from redis.exceptions import ResponseError

log = logging.getLogger("rolloutmq.buffer")

Pieces = list[bytes | memoryview]
"""One value that lies in several places, sent in order. Views are of bytes."""

Part = str | int | float | bytes | memoryview | Pieces

Command = Sequence[Part]  # its name, a key, its arguments

Parts = list[memoryview | bytes | None]

ALIGNMENT = 8  # columns lie at multiples of it in a payload (`buffer.wire.document`)

_PACKED_IN_C = frozenset({str, int, float})

_LARGE_BYTES = 4096  # from here on, sending a value apart is cheaper than copying it

_LINE_BYTES = 64  # longer than the line before a value

# Kernel memory of a Unix socket. The default holds about one payload: the client could not
# encode the next group while the server runs a script. TCP adapts its own.
_SEND_BUFFER_BYTES = 1 << 21


def send(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    """Run commands in one round trip and return the answers in order. Raises the first error."""
    pool: Any = client.connection_pool
    convert: Any = client.response_callbacks
    connection = pool.get_connection()
    answers: list[Any] = []
    try:
        if not _is_real(connection):
            return _send_by_library(client, commands)
        sock = connection._sock
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        _transmit(sock, commands)
        for command in commands:
            try:
                answer = connection.read_response()
                name = command[0]
                answers.append(convert[name](answer) if name in convert else answer)
            except ResponseError as error:
                answers.append(error)
    except BaseException:
        connection.disconnect()  # an answer may still arrive, and must not answer another call
        raise
    finally:
        pool.release(connection)
    return _without_errors(answers)


def receive(
    client: redis.Redis, entries: Sequence[tuple[Sequence[str], int]], *, own_pages: bool = False
) -> list[Parts]:
    """Return the values of the keys of each entry (keys, size), in one round trip.

    `size` is the bytes of all values of the entry, 0 if unknown. They are joined to one part; if
    some are missing, the entry has None for each of those. Parts are read-only and share memory.
    `own_pages`: the system gets the memory back with the last view of a part.
    """
    commands = [("GET", name) for keys, _ in entries for name in keys]
    sizes = [size for _, size in entries]
    pool: Any = client.connection_pool
    connection = pool.get_connection()
    try:
        if _is_real(connection):
            _transmit(connection._sock, commands)
            size = sum(sizes) + _LINE_BYTES * len(commands)
            inbox = _Inbox(connection._sock, _memory(size, own_pages=own_pages))
            if all(sizes):
                inbox.fill(sum(sizes))
            return [inbox.payload(len(keys)) for keys, _ in entries]
    except _NotAValue:
        connection.disconnect()
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    found = iter(_send_by_library(client, commands))
    return [[next(found) for _ in keys] for keys, _ in entries]


def _is_real(connection: Any) -> bool:
    return isinstance(getattr(connection, "_sock", None), socket.socket)


def _send_by_library(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    # the library would put the command, with the whole payload, before the error that it raises
    pipe: Any = client.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*[b"".join(p) if isinstance(p, list) else p for p in command])
    return _without_errors(pipe.execute(raise_on_error=False))


def _without_errors(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _transmit(sock: Any, commands: Sequence[Command]) -> None:
    small = bytearray()
    for command in commands:
        if all([type(part) in _PACKED_IN_C for part in command]):  # a script has some forty of them
            small += hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
        else:
            pieces = _pieces(small, command)
            small = pieces.pop()
            if pieces:
                _send_pieces(sock, [*pieces, small])
                small = bytearray()
        if len(small) >= 2 * _LARGE_BYTES:
            # the server can process it while the next command is packed
            _send_pieces(sock, [small])
            small = bytearray()
    _send_pieces(sock, [small])


def _pieces(start: bytearray, command: Command) -> list[Any]:
    """Return `start` and a command in pieces: large values where they lie, all else in between."""
    small = start
    found = []
    small += b"*%d\r\n" % len(command)
    for part in command:
        if isinstance(part, list):
            pieces = part
        else:
            pieces = [part if isinstance(part, bytes | memoryview) else str(part).encode()]
        small += b"$%d\r\n" % sum(map(len, pieces))
        for piece in pieces:
            if len(piece) < _LARGE_BYTES:
                small += piece
                continue
            found += [small, piece]
            small = bytearray()
        small += b"\r\n"
    return [*found, small]


def _send_pieces(sock: Any, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    """Send pieces with one system call, if they fit into the kernel's buffer."""
    try:
        # TLS sockets encrypt one piece of memory at a time
        sent = 0 if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(pieces)
        for piece in pieces:
            if sent < len(piece):
                sock.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))
    except TimeoutError as error:
        raise redis.TimeoutError("Timeout writing to socket") from error
    except OSError as error:
        raise redis.ConnectionError(f"Error while writing to socket: {error}") from error


class _NotAValue(Exception):
    """The server answered something else, probably an error, which the library then reports."""


def _memory(size: int, *, own_pages: bool = False) -> memoryview:
    """Return new memory for one read. It lives as long as any view of it.

    It is never reused, because views of views refer to its owner only, and nothing can tell which
    part is still in use. (A bytearray would be cleared first.) With `own_pages`, malloc keeps none
    of it, and numpy does not make its pages huge: a virtual machine may have to get each from its
    host, so that the first 600 MB took 2 s of processor time, not 0.4 (measured).
    """
    if own_pages:
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return np.empty(size, np.uint8).data


class _Inbox:
    """Receives answers into one piece of memory, one behind the other.

    Received bytes are in [0, _end), those not parsed yet in [_start, _end), and the joined values
    of the current payload in [_base, _base + _joined).
    """

    def __init__(self, sock: Any, memory: memoryview) -> None:
        self._sock = sock
        self._memory = memory
        self._start = self._end = self._base = self._joined = 0

    def fill(self, count: int) -> None:
        """Receive `count` bytes in one system call, or fewer if they take too long."""
        if isinstance(self._sock, ssl.SSLSocket):
            return  # TLS sockets accept no flags
        timeout = self._sock.gettimeout()
        # 0.2 s; a round trip takes a few hundredths
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 200_000))
        self._sock.settimeout(None)
        try:
            self._receive(count, socket.MSG_WAITALL)
        except BlockingIOError:
            # a value is missing, or the server is busy: the rest is received piece by piece
            log.debug("fewer than %s bytes arrived in time", count)
        finally:
            self._sock.settimeout(timeout)

    def payload(self, values: int) -> Parts:
        """Return the next `values` values joined, or None for each missing one.

        A large payload is moved to a multiple of ALIGNMENT, for which the line before it has room:
        elsewhere, numpy reads columns in twice the time (measured).
        """
        self._joined = 0
        missing = 0
        for _ in range(values):
            size = self._size()
            if size is None:
                missing += 1
            else:
                self._join(size)
        if missing:
            return [None] * missing
        if self._joined >= _LARGE_BYTES:
            aligned = self._base - self._base % ALIGNMENT
            moved = self._memory[aligned : aligned + self._joined]
            moved[:] = self._memory[self._base : self._base + self._joined]
            self._base = aligned
        return [self._memory[self._base : self._base + self._joined].toreadonly()]

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
        """Parse the line before a value and return its size; None if there is no value."""
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
            kept = self._base if self._joined else self._start
            larger = _memory(2 * (self._end - kept) + _LARGE_BYTES)
            larger[: self._end - kept] = self._memory[kept : self._end]
            self._memory = larger
            self._base = 0
            self._start -= kept
            self._end -= kept
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
