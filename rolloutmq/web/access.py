"""Decide whether a request may read or act, by the token in its header, and answer it as JSON.

Loopback needs the token too: every user of the machine can connect. No other site can send the
header, so no page elsewhere can act on behalf of the browser.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from buffer.errors import AccountError, ConfigError, RolloutMQError, RunNotFound, StoreUnavailable
from buffer.redis.whole_file import replace_file
from rolloutmq.http_endpoint import carries, read_token

_STATUS = {ConfigError: 400, RunNotFound: 404, AccountError: 404, StoreUnavailable: 503}

Handler = Callable[[Request], Any]  # the result is sent as JSON, an exception as an error


class NoToken(Exception):
    """Raised when a request carries no token, or a wrong one."""


class ReadOnly(Exception):
    """Raised when a request acts, and the page was started with --read-only."""


_REFUSALS: dict[type[Exception], tuple[int, str, str]] = {
    NoToken: (
        401,
        "this needs a token",
        "open the address that `rolloutmq web` printed: it contains the token",
    ),
    ReadOnly: (403, "this page only reads", "`rolloutmq web` was started with --read-only"),
}


@dataclass(frozen=True, slots=True)
class Access:
    token: str
    read_only: bool = False

    def reading(self, path: str, handler: Handler) -> Route:
        return self._route(path, handler, "GET")

    def acting(self, path: str, handler: Handler) -> Route:
        return self._route(path, handler, "POST")

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        def respond(request: Request) -> Response:
            self.to_read(request)
            if method == "POST" and self.read_only:
                raise ReadOnly
            return Response(encoded(handler(request)), media_type="application/json")

        return Route(path, respond, methods=[method])

    def to_read(self, request: Request) -> None:
        if not self._is_known(request):
            raise NoToken

    def may_act(self, request: Request) -> bool:
        """Return whether requests with this header may act: the page shows buttons then."""
        return self._is_known(request) and not self.read_only

    def _is_known(self, request: Request) -> bool:
        return carries(self.token, request.headers.get("authorization", ""))


def token_of(folder: Path | None) -> str:
    """Return the token in a run's folder, which outlives a restart, or else a new one."""
    token = secrets.token_urlsafe(24)
    if folder is None:
        return token
    file = folder / "web.token"
    with suppress(OSError):  # on a disk that cannot be written, or another user's
        if not file.exists() or file.stat().st_mode & 0o077:
            replace_file(file, token.encode(), is_private=True)
        return read_token(file) if os.access(file, os.R_OK) else token
    return token


def encoded(document: Any) -> bytes:
    """Return a document as JSON bytes; keys may be numbers, NaN becomes null."""
    return orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS)


def number_in(text: str, most: int) -> int:
    """Return the number of a parameter, from 1 to `most`."""
    if not (text.isdecimal() and len(text) < 20 and 1 <= int(text) <= most):
        raise ConfigError(f"{text[:20]!r} is not a number from 1 to {most}")
    return int(text)


def _refuse(request: Request, error: Exception) -> Response:
    code, what, hint = _REFUSALS[type(error)]
    return JSONResponse({"error": what, "hint": hint}, status_code=code)


def _report(request: Request, error: RolloutMQError) -> Response:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return JSONResponse({"error": error.message, "hint": error.hint}, status_code=code)


# the handler of each error that a route raises
ERRORS: dict[Any, Any] = {NoToken: _refuse, ReadOnly: _refuse, RolloutMQError: _report}
