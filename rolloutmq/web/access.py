"""Decide whether a request may read or act: by the token in its header."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from buffer.monitoring.http_endpoint import carries


class NoToken(Exception):
    """Raised when a request carries no token, or a wrong one."""


class ReadOnly(Exception):
    """Raised when a request acts, and the page was started with --read-only."""


@dataclass(frozen=True, slots=True)
class Access:
    """What the requests of browsers may do.

    Reading needs no token on loopback. Acting always needs it, in a header that no other site can
    send, so no page elsewhere can act on behalf of the browser.
    """

    token: str
    read_needs_token: bool = False
    read_only: bool = False

    def to_read(self, request: Request) -> None:
        """Refuse a request that may not read."""
        if self.read_needs_token:
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
