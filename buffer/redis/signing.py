"""Signatures of payloads: HMAC-SHA256 with keys that the server does not know.

    worker     signs what it submits with its own key           [worker] key_file
    producer   signs prompts, if it has a key                   [producer] key_file
    trainer    has all keys, and refuses other bytes            [trainer] keys_file

A MAC covers the run's nonce, the group, the token of the claim, the worker, the SHA-256 of the
bytes and all lines before its own (`buffer.wire.framing`). A token is random and of one claim, so
signed bytes are useless for another one. Keys are symmetric: a trainer could sign for every worker.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from buffer.errors import ConfigError, SignatureError
from buffer.ids import NAME, valid_name
from buffer.job import PayloadRef
from buffer.redis.whole_file import replace_file
from buffer.wire.framing import Data, Line, signed_block, split_signed

PRODUCER = "producer"
"""The name of the producer's key. If the trainer has it, each group must begin with its line."""

KeysOfAll = Mapping[str, Sequence[str]]
"""The keys of each worker, the newest last: an earlier one is valid until its line is removed."""


def read_keys(file: Path) -> dict[str, list[str]]:
    """Return the keys in a private file of lines "worker key". Raises ConfigError."""
    try:
        mode = file.stat().st_mode
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"the keys in {file} cannot be read: {type(error).__name__}",
            hint="`rolloutmq key` makes them",
        ) from error
    if mode & 0o077:
        raise ConfigError(f"{file} is readable by other users", hint=f"chmod 600 {file}")
    keys: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        worker, _, key = line.partition(" ")
        # the line is not quoted: it may contain a key
        if not (NAME.fullmatch(worker) and re.fullmatch("[0-9a-f]{64}", key)):
            raise ConfigError(f"{file}:{number} is not the name of a worker and 64 hex digits")
        keys.setdefault(worker, []).append(key)
    return keys


def write_keys(file: Path, keys: KeysOfAll) -> None:
    """Replace a file of keys, in one step, by one that only its owner may read."""
    lines = [f"{worker} {key}\n" for worker, own in keys.items() for key in own]
    replace_file(file, "".join(lines).encode("ascii"), is_private=True)


@dataclass(frozen=True, slots=True)
class Key:
    worker: str
    secret: str = field(repr=False)

    @classmethod
    def read(cls, file: Path, worker: str | None = None) -> Key:
        """Return the newest key of `worker`, or the only key of a file. Raises ConfigError."""
        keys = read_keys(file)
        if worker is None and len(keys) == 1:
            worker = next(iter(keys))
        if worker not in keys:
            known = ", ".join(keys) or "no worker"
            raise ConfigError(
                f"{file} has keys of {known}, not of {worker or 'one worker'}",
                hint="give a worker the key of its --id, or leave --id out",
            )
        return cls(worker, keys[worker][-1])

    @classmethod
    def new(cls, worker: str) -> Key:
        """Return a random key. Raises ConfigError for an invalid name of a worker."""
        return cls(valid_name("worker", worker), secrets.token_hex(32))


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what the owner of a key stores in the run with nonce `run`."""

    run: str
    key: Key

    def sign(self, gid: str, token: str, data: Sequence[Data], before: Sequence[str] = ()) -> bytes:
        """Return lines to store before a claim's bytes; `before`: lines of the bytes it read."""
        facts = f"{token} {self.key.worker} {_digest(*data)}"
        mac = _mac(self.key.secret, self.run, gid, before, facts)
        return signed_block([*before, f"{facts} {mac}"])

    def check(self, ref: PayloadRef, data: Data) -> None:
        """Raise SignatureError for bytes that this process should not continue.

        It does not know the keys of others: it will sign what their lines say of these bytes.
        """
        lines, content = split_signed(data)
        if lines or ref.token != "init":  # a producer may have no key: the trainer decides
            _check_last(ref, lines, content)


class Keyring:
    """The keys of all workers of the run with nonce `run`, as its file has them now."""

    def __init__(self, run: str, file: Path) -> None:
        self._run = run
        self._file = file
        self._lock = threading.Lock()
        self._version: tuple[int, ...] | None = None
        self._keys: KeysOfAll = {}
        self._current()

    def check(self, ref: PayloadRef, data: Data) -> None:
        """Raise SignatureError unless key owners signed all parts; ConfigError for a bad file."""
        keys = self._current()
        lines, content = split_signed(data)
        last = _check_last(ref, lines, content)
        for number, line in enumerate(lines):
            _check_mac(keys, self._run, ref.gid, lines[:number], line)
        if PRODUCER in keys and Line.parse(lines[0]).worker != PRODUCER:
            raise SignatureError(
                f"group {ref.gid} is signed by {last.worker}, and its prompt not by the producer"
            )

    def _current(self) -> KeysOfAll:
        found = self._file.stat() if self._file.exists() else None
        version = found and (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode)
        with self._lock:
            if not version or version != self._version:
                self._keys = read_keys(self._file)
                self._version = version
            return self._keys


def _check_last(ref: PayloadRef, lines: Sequence[str], content: Data) -> Line:
    """Return the last line of a payload. Raises SignatureError if it is of other bytes."""
    if not lines:
        raise SignatureError(
            f"group {ref.gid} is not signed",
            hint="its worker needs [worker] key_file: see `rolloutmq key`",
        )
    last = Line.parse(lines[-1])
    if last.token != ref.token:
        raise SignatureError(f"{last.worker} signed group {ref.gid} for another claim")
    if last.digest != _digest(content):
        raise SignatureError(f"the bytes of group {ref.gid} are not those that were signed")
    return last


def _check_mac(keys: KeysOfAll, run: str, gid: str, before: Sequence[str], text: str) -> None:
    line = Line.parse(text)
    known = keys.get(line.worker, ())
    macs = [_mac(key, run, gid, before, text.rpartition(" ")[0]) for key in known]
    if not any(hmac.compare_digest(mac, line.mac) for mac in macs):
        found = "is not of its key" if known else "is not known: it has no key"
        raise SignatureError(f"the signature of {line.worker} under group {gid} {found}")


def _digest(*data: Data) -> str:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def _mac(key: str, run: str, gid: str, before: Sequence[str], facts: str) -> str:
    # none of these contains a line feed
    text = "\n".join(("rolloutmq", run, gid, *before, facts))
    return hmac.new(bytes.fromhex(key), text.encode(), "sha256").hexdigest()
