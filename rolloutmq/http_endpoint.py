"""Serve metrics over HTTP: `/metrics` for Prometheus, `/healthz` for probes, and pages of JSON.

Metrics show what a run does: any address but loopback requires a token.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

import orjson
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder

from buffer.errors import ConfigError
from producer_workers.http_client import is_loopback


def host_of(header: str) -> str:
    """Return NAME of a header `Host: NAME[:PORT]`, without brackets; "" if it is empty."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return "?"


def carries(token: str, authorization: str) -> bool:
    """Compare the token of a header `Authorization: Bearer TOKEN` in constant time."""
    return secrets.compare_digest(authorization.removeprefix("Bearer ").encode(), token.encode())


def read_token(path: Path) -> str:
    """Read the token in a file. Raises ConfigError."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    if not token:
        raise ConfigError(
            f"{path} contains no token", hint="create one: openssl rand -hex 16 > token"
        )
    return token


CLOSE_S = 0.1  # the longest that `close` waits for a server without requests
Answer = Callable[[str, list[tuple[str, str]]], Any]


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""


class MetricsEndpoint:
    """Serves metrics, and `pages` (path: function that returns JSON), from a thread until `close`.

    `port` 0 takes a free one; see `url`.
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
                f"metrics on {host} could be read by every machine that reaches it",
                hint="set a token (see --help), or listen on 127.0.0.1",
            )
        self._token = token
        self._pages = pages or {}
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, ThreadingWSGIServer, _Quiet)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: dict[str, Any], start: Answer) -> Iterable[bytes]:
        if request["PATH_INFO"] == "/healthz":  # shows nothing of a run, so it needs no token
            return _respond(start, "200 OK", b"ok\n")
        if self._token and not carries(self._token, request.get("HTTP_AUTHORIZATION", "")):
            return _respond(
                start, "401 Unauthorized", b"a token is required: Authorization: Bearer TOKEN\n"
            )
        # DNS rebinding: a page elsewhere could let its own name resolve to 127.0.0.1 and read this
        host = host_of(request.get("HTTP_HOST", ""))
        if host and not self._token and not is_loopback(host):
            return _respond(start, "400 Bad Request", b"request it as localhost, or set a token\n")
        if request["PATH_INFO"] == "/metrics":
            try:
                choose_encoder(request.get("HTTP_ACCEPT", ""))
            except (TypeError, ValueError):  # of a version that is no number
                return _respond(start, "400 Bad Request", b"the header Accept is not valid\n")
            answer: Iterable[bytes] = self._metrics(request, start)
            return answer
        if page := self._pages.get(request["PATH_INFO"]):
            return _respond(start, "200 OK", orjson.dumps(page()), "application/json")
        known = ", ".join(["/metrics", *self._pages])
        return _respond(start, "404 Not Found", f"not found; there is {known}\n".encode())


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that is taken, forbidden, or not of this machine."""
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another port or host"
    )


def _respond(
    start: Answer, status: str, body: bytes, kind: str = "text/plain; charset=utf-8"
) -> list[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]
