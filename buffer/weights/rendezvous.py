"""An authenticated connection between a trainer and one process of an engine.

Both sides prove that they know the token of the announcement: HMAC-SHA256 over random bytes of
both. The trainer reads at most 64 bytes from a stranger. Then the connection is a key-value store,
in which torch's process groups exchange addresses; its end tells that the peer died.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from buffer.errors import WireError

NONCE_BYTES = 32
HANDSHAKE_S = 30.0  # for the proofs of both sides

MAX_VALUE_BYTES = 1 << 20  # only addresses and verdicts are exchanged here

_LENGTHS = struct.Struct("!HI")


class Rendezvous:
    """One side of the connection. All methods raise WireError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._lost_reason = ""
        self._on_loss: Callable[[], None] | None = None
        threading.Thread(target=self._read_values, name="weights-rendezvous", daemon=True).start()

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Rendezvous:
        try:
            connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
        except OSError as error:
            raise WireError(f"cannot connect to the trainer at {host}:{port}: {error}") from error
        return cls._authenticate(connection, _prove_as_worker, token)

    @classmethod
    def accept(cls, connection: socket.socket, token: str) -> Rendezvous:
        """Authenticate, as the trainer, a peer that has connected."""
        return cls._authenticate(connection, _prove_as_trainer, token)

    @classmethod
    def _authenticate(
        cls, connection: socket.socket, prove: Callable[[socket.socket, bytes], None], token: str
    ) -> Rendezvous:
        try:
            connection.settimeout(HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(connection, token.encode())
            connection.settimeout(None)
        except (OSError, WireError) as error:
            connection.close()
            raise WireError(f"the peer could not be authenticated: {error}") from error
        return cls(connection)

    @property
    def own_host(self) -> str:
        """The address of this side as the peer can reach it."""
        return str(self._connection.getsockname()[0])

    @property
    def is_lost(self) -> bool:
        return bool(self._lost_reason)

    def on_loss(self, call: Callable[[], None]) -> None:
        """Call `call` once the peer is gone: on another thread, or now if it is gone already."""
        with self._changed:
            self._on_loss = call
            is_lost = self.is_lost
        if is_lost:
            call()

    def put(self, key: str, value: bytes) -> None:
        name = key.encode()
        with self._changed:
            self._values[key] = value
            try:
                self._connection.sendall(_LENGTHS.pack(len(name), len(value)) + name + value)
            except OSError as error:
                raise WireError(f"cannot send {key!r} to the peer: {error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return a value as soon as either side has set it."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self._values or self._lost_reason, timeout_s
            ):
                raise WireError(f"the peer did not send {key!r} within {timeout_s:g} s")
            if key not in self._values:
                raise WireError(f"the peer left before it sent {key!r}: {self._lost_reason}")
            return self._values[key]

    def has(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def close(self) -> None:
        self._mark_lost("closed by this side")
        with suppress(OSError):  # the peer may have closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _read_values(self) -> None:
        try:
            while True:
                key_bytes, value_bytes = _LENGTHS.unpack(_read(self._connection, _LENGTHS.size))
                if value_bytes > MAX_VALUE_BYTES:
                    raise WireError(f"a value of {value_bytes} bytes")
                key = _read(self._connection, key_bytes).decode(errors="replace")
                value = _read(self._connection, value_bytes)
                with self._changed:
                    self._values[key] = value
                    self._changed.notify_all()
        except (OSError, WireError) as error:
            self._mark_lost(str(error))

    def _mark_lost(self, reason: str) -> None:
        with self._changed:
            call = None if self._lost_reason else self._on_loss
            self._lost_reason = self._lost_reason or reason
            self._changed.notify_all()
        if call:
            call()


def _prove_as_trainer(connection: socket.socket, token: bytes) -> None:
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own_nonce)
    peer_nonce = _read(connection, NONCE_BYTES)
    proof = _read(connection, NONCE_BYTES)
    _check_proof(proof, token, b"worker", own_nonce, peer_nonce)
    connection.sendall(_proof(token, b"trainer", own_nonce, peer_nonce))


def _prove_as_worker(connection: socket.socket, token: bytes) -> None:
    peer_nonce = _read(connection, NONCE_BYTES)
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own_nonce + _proof(token, b"worker", peer_nonce, own_nonce))
    _check_proof(_read(connection, NONCE_BYTES), token, b"trainer", peer_nonce, own_nonce)


def _proof(token: bytes, role: bytes, trainer_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(token, role + trainer_nonce + worker_nonce, hashlib.sha256)


def _check_proof(
    proof: bytes, token: bytes, role: bytes, trainer_nonce: bytes, worker_nonce: bytes
) -> None:
    if not hmac.compare_digest(proof, _proof(token, role, trainer_nonce, worker_nonce)):
        raise WireError("wrong proof: the peer does not have the announced token")


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise WireError("the connection was closed")
        parts += part
    return bytes(parts)
