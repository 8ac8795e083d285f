"""The HTTP side of the metrics: `/metrics` for Prometheus, and pages of JSON for whoever reads
that.

It listens on loopback unless told otherwise, and wants a token when it is not: what a run does is
nobody's business.

Who may ask what listens on HTTP: this machine, and elsewhere only who has the token.
"""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import orjson
from prometheus_client import CollectorRegistry, make_wsgi_app

from buffer.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """The name in a header `Host: NAME[:PORT]`, without brackets; "" where there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return "?"


def carries(token: str, authorization: str) -> bool:
    """Whether a header `Authorization: Bearer TOKEN` holds the token; takes as long for a wrong
    one.
    """
    return secrets.compare_digest(authorization.removeprefix("Bearer ").encode(), token.encode())


def read_token(path: Path) -> str:
    """The token in a file. ConfigError where there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {path} cannot be read: {error}") from error
    if not token:
        raise ConfigError(
            f"{path} holds no token", hint="for example: openssl rand -hex 16 > token"
        )
    return token


Answer = Callable[[str, list[tuple[str, str]]], Any]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class MetricsEndpoint:
    """Serves until `close`. `port` 0 takes a free one; `url` says which. `pages`: by path, what
    they answer.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        pages: Mapping[str, Callable[[], Any]] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
    ) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                f"metrics on {host} could be read by everybody who reaches it",
                hint="give it a token (--help says how), or listen on 127.0.0.1",
            )
        self._token = token
        self._pages = pages or {}
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _Server, _Quiet)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="another port"
            ) from error
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: dict[str, Any], start: Answer) -> Iterable[bytes]:
        if self._token and not carries(self._token, request.get("HTTP_AUTHORIZATION", "")):
            return _say(
                start, "401 Unauthorized", b"a token is wanted: Authorization: Bearer TOKEN\n"
            )
        # without a token, a page elsewhere whose name suddenly means 127.0.0.1 must not read this
        host = host_of(request.get("HTTP_HOST", ""))
        if host and not self._token and not is_loopback(host):
            return _say(start, "400 Bad Request", b"ask for it as localhost, or give it a token\n")
        if request["PATH_INFO"] == "/metrics":
            answer: Iterable[bytes] = self._metrics(request, start)
            return answer
        if page := self._pages.get(request["PATH_INFO"]):
            return _say(start, "200 OK", orjson.dumps(page()), "application/json")
        known = ", ".join(["/metrics", *self._pages])
        return _say(start, "404 Not Found", f"there is {known}\n".encode())


def _say(
    start: Answer, status: str, body: bytes, kind: str = "text/plain; charset=utf-8"
) -> list[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]
