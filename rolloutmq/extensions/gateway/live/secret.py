"""The secret of the gateways of a run, and the keys that it signs.

    key_file ──▶ admin key (opens sessions)
             └─▶ MAC of (run, group, rollout, opening) in each session's key

So any gateway with the same file finds the group and the rollout of a key, and refuses all others.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from buffer.errors import ConfigError

_KEY = re.compile(r"rmq-live-([\w-]{1,200})\.([\w-]{43})", re.ASCII)


class SessionName(NamedTuple):
    """A rollout of a group; `opening`: new each time that a program opens the group."""

    gid: str
    rollout: int
    opening: str

    def __str__(self) -> str:
        return f"{self.gid}/{self.rollout}/{self.opening}"


class Secret:
    def __init__(self, secret: str, run: str) -> None:
        self.admin_key = secret
        self._key = hashlib.sha256(f"rolloutmq sessions {run} {secret}".encode()).digest()

    @classmethod
    def read(cls, file: Path, run: str) -> Secret:
        """Return the secret in a private file, which is made if it is missing.

        Raises ConfigError.
        """
        try:
            _make(file)
            mode = file.stat().st_mode
            secret = file.read_text(encoding="ascii", errors="replace").strip()
        except OSError as error:
            raise ConfigError(f"[gateway] key_file {file}: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(f"{file} is readable by other users", hint=f"chmod 600 {file}")
        if not re.fullmatch(r"[\w-]{32,256}", secret, re.ASCII):
            hint = "write 32 or more letters and digits into it, or delete it for a random one"
            raise ConfigError(f"{file} is no key", hint=hint)
        return cls(secret, run)

    def is_admin(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.admin_key.encode())

    def key_of(self, name: SessionName) -> str:
        told = _encoded(str(name).encode())
        return f"rmq-live-{told}.{self._mac(told)}"

    def name_of(self, key: str) -> SessionName | None:
        """Return the session of a key; None if no gateway of the run made it."""
        match = _KEY.fullmatch(key)
        # before anything is decoded: what has a right MAC was written by `key_of`
        if not match or not hmac.compare_digest(self._mac(match[1]), match[2]):
            return None
        gid, rollout, opening = base64.urlsafe_b64decode(match[1] + "==").decode().split("/")
        return SessionName(gid, int(rollout), opening)

    def _mac(self, told: str) -> str:
        return _encoded(hmac.new(self._key, told.encode(), "sha256").digest())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _make(file: Path) -> None:
    """Write a random secret, unless another process has written one."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    part.touch(mode=0o600, exist_ok=False)
    part.write_text(secrets.token_urlsafe(32) + "\n", encoding="ascii")
    try:
        os.link(part, file)
    except FileExistsError:
        pass
    finally:
        part.unlink()
