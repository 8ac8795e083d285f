"""A worker's own connection for hints of control changes and for its receipts (I10).

With RESP3, messages of the channel and replies of scripts arrive on one connection. Only opening it
blocks, so an event loop uses it without a thread. A worker without it sends receipts with
heartbeats.
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

from buffer.control.control import STATE_FIELDS, ControlState
from buffer.errors import RunDamaged
from buffer.redis.keys import Keys, SlotKeys
from buffer.redis.scripts import Arg
from buffer.redis.store import Store
from buffer.redis.url import open_client

log = logging.getLogger("rolloutmq.worker")

CONNECT_S = 5.0
_NOT_YET = object()


def receipt(keys: Keys, worker: str, nonce: str, ack: int) -> tuple[SlotKeys, dict[str, Arg]]:
    return keys.slots(worker=worker), {"nonce": nonce, "ack": ack}


def read_hint(message: bytes) -> ControlState | None:
    """Return the state in a message of the control channel; None for an invalid one."""
    try:
        fields = message.decode().split("\0")
        return ControlState.parse(fields if len(fields) == len(STATE_FIELDS) else [])
    except (RunDamaged, UnicodeDecodeError) as error:
        log.warning("ignoring an invalid message of the control channel: %s", error)
        return None


class ControlConnection:
    """Receives hints and sends receipts for one registration of a worker. Opening it blocks.

    A broken connection raises redis.RedisError: open another one.
    """

    def __init__(self, store: Store, keys: Keys, worker: str, nonce: str) -> None:
        # a client of its own, since the store closes its clients after errors; its URL is looked up
        # again, since in a cluster the run may have moved to another node
        client = open_client(
            store.servers.url_of(keys.control), name=f"{store.name}-line", timeout_s=CONNECT_S
        )
        self._client = client
        self._script = store.scripts["receipt"]
        # every receipt differs only in the epoch, which comes last
        self._receipt = self._script.command(*receipt(keys, worker, nonce, 0))[:-1]
        try:
            self._connection: Any = client.connection_pool.get_connection()
            self._socket: Any = getattr(self._connection, "_sock", None)
            if not isinstance(self._socket, socket.socket):
                raise redis.ConnectionError("a server in memory has no socket")
            self._socket.setblocking(False)
            self._send(("HELLO", 3), ("SUBSCRIBE", keys.control))
        except BaseException:
            client.close()
            raise
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        self._asked: deque[tuple[int, int]] = deque()

    def fileno(self) -> int:
        """Return the file descriptor of the socket, for an event loop to watch."""
        return int(self._socket.fileno())

    def close(self) -> None:
        self._connection.disconnect()
        self._client.close()

    def send_receipt(self, ack: int, known_epoch: int) -> None:
        """Send the receipt for epoch `ack`; `known_epoch`, the newest known, returns with it."""
        # its worker has registered with a script, so that all are loaded
        self._send((*self._receipt, ack))
        self._asked.append((ack, known_epoch))

    def receive(
        self,
        hint: Callable[[ControlState], object],
        answer: Callable[[ControlState | None, int, int], object],
    ) -> None:
        """Read what has arrived, and call `hint` or `answer` for each message.

        `hint` gets a state from the channel. `answer` gets (state, ack, known_epoch) for a receipt;
        the state is None if the server does not know this registration.
        """
        self._receive()
        while True:
            try:
                item = self._reader.gets()
            except hiredis.ProtocolError as error:
                raise redis.InvalidResponse(str(error)) from error
            if item is _NOT_YET:
                return
            if isinstance(item, hiredis.ReplyError):
                raise redis.ResponseError(str(item))
            if isinstance(item, hiredis.PushNotification):
                if item[0] == b"message" and (state := read_hint(item[2])):
                    hint(state)
            elif isinstance(item, list):
                code, *fields = [part.decode(errors="replace") for part in item]
                is_known = code not in ("UNKNOWN", "REPLACED")
                answer(ControlState.parse(fields) if is_known else None, *self._asked.popleft())

    def _send(self, *commands: tuple[Any, ...]) -> None:
        packed = b"".join(map(hiredis.pack_command, commands))
        try:
            sent = self._socket.send(packed)
        except OSError as error:
            raise redis.ConnectionError(f"cannot send a receipt: {error}") from error
        if sent < len(packed):
            # a receipt fits the socket's buffer unless the server has stopped reading
            raise redis.ConnectionError("cannot send a receipt: the server does not read")

    def _receive(self) -> None:
        try:
            while data := self._socket.recv(65_536):
                self._reader.feed(data)
                # bytes that TLS has already decrypted do not make the socket readable again
                if not (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise redis.ConnectionError(f"cannot read hints: {error}") from error
        raise redis.ConnectionError("the server closed the connection")
