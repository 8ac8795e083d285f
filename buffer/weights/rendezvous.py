"""Where a trainer and one process of an engine meet, each knowing that it is the other.

Both prove that they hold the token of the announcement before anything else is said: HMAC-SHA256 over random bytes of
both sides. A stranger on the port can make the trainer read 64 bytes, and learns nothing.

After that each side may `put` values that the other may `get`: a store of two, in which torch's process groups find
each other. It is also their life line: when one process dies, the kernel closes it, and the other one knows.
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
GREETING_S = 30.0
"""For the proofs of both sides."""

VALUE_BYTES = 1 << 20
"""A value is at most as long. What passes here are addresses and verdicts."""

_LENGTHS = struct.Struct("!HI")


class Meeting:
    """One side of it. Raises WireError from `get` where the other side left, is silent, or is a stranger."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._lost = ""
        self._on_loss: Callable[[], None] | None = None
        threading.Thread(target=self._listen, name="weights-meeting", daemon=True).start()

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Meeting:
        """As a worker, to the trainer that announced itself. Raises WireError."""
        try:
            connection = socket.create_connection((host, port), timeout=GREETING_S)
        except OSError as error:
            raise WireError(f"the trainer cannot be met at {host}:{port}: {error}") from error
        return cls._greet(connection, _prove_as_worker, token)

    @classmethod
    def accept(cls, connection: socket.socket, token: str) -> Meeting:
        """As the trainer, whoever connected. Raises WireError, and has said nothing that matters."""
        return cls._greet(connection, _prove_as_trainer, token)

    @classmethod
    def _greet(cls, connection: socket.socket, prove: Callable[[socket.socket, bytes], None], token: str) -> Meeting:
        try:
            connection.settimeout(GREETING_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(connection, token.encode())
            connection.settimeout(None)
        except (OSError, WireError) as error:
            connection.close()
            raise WireError(f"whoever is at the other end did not prove who it is: {error}") from error
        return cls(connection)

    @property
    def own_host(self) -> str:
        """The address of this side, as the other one can reach it."""
        return str(self._connection.getsockname()[0])

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    def on_loss(self, call: Callable[[], None]) -> None:
        """`call` once the other side is gone, on another thread."""
        with self._changed:
            self._on_loss, is_lost = call, self.is_lost
        if is_lost:
            call()

    def put(self, key: str, value: bytes) -> None:
        """Both sides have it then."""
        name = key.encode()
        with self._changed:
            self._values[key] = value
            try:
                self._connection.sendall(_LENGTHS.pack(len(name), len(value)) + name + value)
            except OSError as error:
                raise WireError(f"the other side cannot be told {key}: {error}") from error

    def get(self, key: str, limit_s: float) -> bytes:
        """Waits until one of both sides has put it."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self._lost, limit_s):
                raise WireError(f"the other side did not say {key} within {limit_s:g} s")
            if key not in self._values:
                raise WireError(f"the other side left before it said {key}: {self._lost}")
            return self._values[key]

    def has(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def close(self) -> None:
        self._lose("closed here")
        with suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _listen(self) -> None:
        try:
            while True:
                key_bytes, value_bytes = _LENGTHS.unpack(_read(self._connection, _LENGTHS.size))
                if value_bytes > VALUE_BYTES:
                    raise WireError(f"a value of {value_bytes} bytes")
                key = _read(self._connection, key_bytes).decode(errors="replace")
                value = _read(self._connection, value_bytes)
                with self._changed:
                    self._values[key] = value
                    self._changed.notify_all()
        except (OSError, WireError) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        with self._changed:
            call = None if self._lost else self._on_loss
            self._lost = self._lost or why
            self._changed.notify_all()
        if call:
            call()


def _prove_as_trainer(connection: socket.socket, token: bytes) -> None:
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(mine)
    theirs, proof = _read(connection, NONCE_BYTES), _read(connection, NONCE_BYTES)
    _check(proof, token, b"worker", mine, theirs)
    connection.sendall(_proof(token, b"trainer", mine, theirs))


def _prove_as_worker(connection: socket.socket, token: bytes) -> None:
    theirs, mine = _read(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(mine + _proof(token, b"worker", theirs, mine))
    _check(_read(connection, NONCE_BYTES), token, b"trainer", theirs, mine)


def _proof(token: bytes, who: bytes, of_trainer: bytes, of_worker: bytes) -> bytes:
    return hmac.digest(token, who + of_trainer + of_worker, hashlib.sha256)


def _check(proof: bytes, token: bytes, who: bytes, of_trainer: bytes, of_worker: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(token, who, of_trainer, of_worker)):
        raise WireError("its proof is wrong: it has not the token that the trainer announced")


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise WireError("the connection was closed")
        parts += part
    return bytes(parts)
