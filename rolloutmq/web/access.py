"""Decide whether a request may read or act: by the token in its header."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from rolloutmq.http_endpoint import carries, read_token


class NoToken(Exception):
    """Raised when a request carries no token, or a wrong one."""


class ReadOnly(Exception):
    """Raised when a request acts, and the page was started with --read-only."""


def token_of(folder: Path | None) -> str:
    """Return the token that a run's folder keeps, so that open pages outlive a new start.

    A new one without a folder, or where this user may not read or write in it.
    """
    token = secrets.token_urlsafe(24)
    if folder is None:
        return token
    file = folder / "web.token"
    with suppress(PermissionError):
        if not file.exists() or file.stat().st_mode & 0o077:
            part = file.with_suffix(".tmp")
            part.touch(mode=0o600)
            part.write_text(token, encoding="utf-8")
            part.rename(file)
        return read_token(file) if os.access(file, os.R_OK) else token
    return token


@dataclass(frozen=True, slots=True)
class Access:
    """What the requests of browsers may do.

    Both need the token, on loopback too, where every user and program of the machine can connect.
    It is in a header that no other site can send, so no page elsewhere can act on behalf of the
    browser.
    """

    token: str
    read_only: bool = False

    def to_read(self, request: Request) -> None:
        """Refuse a request that may not read."""
        self._require_token(request)

    def to_act(self, request: Request) -> None:
        """Refuse a request that may not act."""
        self._require_token(request)
        if self.read_only:
            raise ReadOnly

    def may_act(self, request: Request) -> bool:
        """Return whether requests with this header may act: the page shows buttons then."""
        is_known = carries(self.token, request.headers.get("authorization", ""))
        return is_known and not self.read_only

    def _require_token(self, request: Request) -> None:
        if not carries(self.token, request.headers.get("authorization", "")):
            raise NoToken
