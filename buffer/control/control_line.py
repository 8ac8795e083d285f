"""A worker's line to the control state: hints come in, receipts go out, on one connection and
without a wait (I10).

In RESP3 what the channel says and what the server answers come side by side. Nothing blocks but the
opening, so that an event loop may hold the line itself: from a hint to the receipt no thread is
waited for. Nor is it needed: who has none hears and says the same with its heartbeats.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import hiredis
import redis

from buffer.control.control import ControlState
from buffer.errors import ScriptError
from buffer.store.keys import Keys, SlotKeys
from buffer.store.scripts import Arg
from buffer.store.store import Store
from buffer.store.url import open_client

log = logging.getLogger("rolloutmq.worker")

CONNECT_S = 5.0
_READ_BYTES = 65_536
_NOT_YET = object()


def receipt(keys: Keys, worker: str, nonce: str, ack: int) -> tuple[SlotKeys, dict[str, Arg]]:
    """Return keys and arguments of the script."""
    return keys.slots(worker=worker), {"nonce": nonce, "ack": ack}


def _socket_of(connection: Any) -> Any:
    found = getattr(connection, "_sock", None)
    if not isinstance(found, socket.socket):
        raise redis.ConnectionError("a server in memory has no socket")
    return found


def _read_hint(message: bytes) -> ControlState | None:
    try:
        return ControlState.parse_hint(message)
    except ScriptError as error:
        log.warning("a hint that nobody can follow: %s", error)
        return None


class ControlLine:
    """Opened for one registration of a worker; blocks meanwhile. Every method raises
    redis.RedisError where the line is broken; it is of no use any more then.
    """

    def __init__(self, store: Store, keys: Keys, worker: str, nonce: str) -> None:
        # a client of its own, which nobody else closes; in a cluster, another node may hold the run
        # by now
        client = open_client(
            store.servers.url_of(keys.control), name=f"{store.name}-line", timeout_s=CONNECT_S
        )
        self._client = client
        self._script = store.scripts["receipt"]
        self._whose = (keys, worker, nonce)
        try:
            self._connection: Any = client.connection_pool.get_connection()
            self._socket = _socket_of(self._connection)
        except BaseException:
            client.close()
            raise
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        self._asked: deque[tuple[int, int]] = deque()
        self._verb = "EVAL"
        self._socket.setblocking(False)
        self._send(("HELLO", 3), ("SUBSCRIBE", keys.control))

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def close(self) -> None:
        self._connection.disconnect()
        self._client.close()

    def say(self, ack: int, heard: int) -> None:
        """Hand in the receipt for epoch `ack`. `heard`: the epoch that is known; it comes back with
        the answer.
        """
        keys, args = self._script.arrange(*receipt(*self._whose, ack))
        self._send((self._verb, self._script.text(self._verb), len(keys), *keys, *args))
        self._verb = "EVALSHA"
        self._asked.append((ack, heard))

    def hear(
        self,
        hint: Callable[[ControlState], object],
        answer: Callable[[ControlState | None, int, int], object],
    ) -> None:
        """Take in what has come: `hint` of the channel, `answer` to a receipt (state, ack, heard);
        its state is None where the server does not know this registration (any more).
        """
        self._receive()
        while (item := self._next()) is not _NOT_YET:
            if isinstance(item, hiredis.ReplyError):
                raise redis.ResponseError(str(item))
            if isinstance(item, hiredis.PushNotification):
                if item[0] == b"message" and (state := _read_hint(item[2])):
                    hint(state)
            elif isinstance(item, list):
                code, *fields = [part.decode(errors="replace") for part in item]
                is_known = code not in ("UNKNOWN", "REPLACED")
                answer(ControlState.parse(fields) if is_known else None, *self._asked.popleft())

    def _next(self) -> Any:
        try:
            return self._reader.gets()
        except hiredis.ProtocolError as error:
            raise redis.InvalidResponse(str(error)) from error

    def _send(self, *commands: tuple[Any, ...]) -> None:
        packed = b"".join(map(hiredis.pack_command, commands))
        try:
            sent = self._socket.send(packed)
        except OSError as error:
            raise redis.ConnectionError(f"cannot write: {error}") from error
        if sent < len(packed):
            raise redis.ConnectionError("the server does not read")

    def _receive(self) -> None:
        try:
            while data := self._socket.recv(_READ_BYTES):
                self._reader.feed(data)
                # what is decrypted already makes no socket readable
                if not (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise redis.ConnectionError(f"cannot read: {error}") from error
        raise redis.ConnectionError("the server hung up")
