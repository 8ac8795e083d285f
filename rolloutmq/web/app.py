"""Serve a run to browsers (Starlette): a page without a build step, JSON, and server-sent events.

    GET  /                     the page; /static/… its script and style
    GET  /api/stream           server-sent events: a snapshot per second (rolloutmq/web/watcher.py)
    GET  /api/groups           ?where=JSON&order=-tokens&limit=100, see buffer/query
    GET  /api/groups/{gid}     one group with its tokens
    GET  /api/dead             dead letters
    POST /api/pause  /api/continue  /api/groups/{gid}/requeue  /api/groups/{gid}/drop

Reading needs no token on loopback. Acting always needs it, in a header that no other site can send,
so no page elsewhere can act on behalf of the browser. A request for an unknown `Host` is refused,
so no page elsewhere can read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from buffer.control.control import Mode
from buffer.errors import (
    AccountError,
    ConfigError,
    RolloutMQError,
    RunNotFound,
    StoreUnavailable,
)
from buffer.monitoring.found_group import find_group
from buffer.monitoring.history import History
from buffer.monitoring.http_endpoint import carries
from buffer.monitoring.token_texts import TokenTexts
from buffer.run import Run
from rolloutmq.web.watcher import Watcher

STATIC = Path(__file__).parent / "static"
MOST_ROWS = 1000
POLICY = (
    "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors "
    "'none'; base-uri 'none'"
)
SAFE_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
_STATUS = {ConfigError: 400, RunNotFound: 404, AccountError: 404, StoreUnavailable: 503}


class RunView:
    """Answers the requests of browsers for one run. Methods that act check the token first."""

    def __init__(
        self, run: Run, watcher: Watcher, texts: TokenTexts, token: str, *, read_needs_token: bool
    ) -> None:
        self._run = run
        self._watcher = watcher
        self._texts = texts
        self._token = token
        self._read_needs_token = read_needs_token

    async def stream(self, request: Request) -> Response:
        self._admit(request, acts=False)
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        async for snapshot in self._watcher.snapshots():
            if await request.is_disconnected():
                return
            yield b"data: " + orjson.dumps(snapshot, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"

    def groups(self, request: Request) -> Response:
        self._admit(request, acts=False)
        query: Mapping[str, str] = request.query_params
        where = _json(query.get("where") or "{}")
        limit = _number(query.get("limit") or "100", MOST_ROWS)
        rows = self._run.groups.find(where, limit=limit, order=query.get("order") or "")
        return _answer([asdict(row) for row in rows])

    def group(self, request: Request) -> Response:
        self._admit(request, acts=False)
        found = find_group(self._run, request.path_params["gid"])
        states = found.group.states if found.group else []
        document = found.document(states, tokens=True)
        for member in document["members"]:
            member["token_texts"] = self._texts.of(member["response_ids"])
        return _answer(document)

    def dead(self, request: Request) -> Response:
        self._admit(request, acts=False)
        return _answer(
            [asdict(letter) for letter in islice(self._run.dead_letters.newest(), MOST_ROWS)]
        )

    def requeue(self, request: Request) -> Response:
        self._admit(request, acts=True)
        return _answer({"before": self._run.jobs.requeue(request.path_params["gid"])})

    def drop(self, request: Request) -> Response:
        self._admit(request, acts=True)
        return _answer({"before": self._run.jobs.drop(request.path_params["gid"])})

    def pause(self, request: Request) -> Response:
        self._admit(request, acts=True)
        mode = request.query_params.get("mode", "abort")
        if mode not in (Mode.ABORT, Mode.DRAIN, Mode.KEEP):
            raise ConfigError(f"there is no mode {mode!r}", hint="one of abort, drain, keep")
        return _answer({"epoch": self._run.control.set_mode("operator", Mode(mode)).epoch})

    def resume(self, request: Request) -> Response:
        self._admit(request, acts=True)
        return _answer({"epoch": self._run.control.set_mode("operator", Mode.RUN).epoch})

    def _admit(self, request: Request, *, acts: bool) -> None:
        if not acts and not self._read_needs_token:
            return
        if not carries(self._token, request.headers.get("authorization", "")):
            raise _NoToken


class _NoToken(Exception):
    """Raised when a request carries no token, or a wrong one."""


def make_app(
    run: Run,
    *,
    run_dir: Path | None,
    token: str,
    hosts: list[str],
    read_needs_token: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Return the application.

    `hosts` are the names under which it may be requested; streams end when `is_over` returns True.
    """
    watcher = Watcher(run, History(run_dir), is_over)
    view = RunView(
        run,
        watcher,
        TokenTexts(_model_folders(run, run_dir)),
        token,
        read_needs_token=read_needs_token,
    )

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "page.html")

    def post(path: str, endpoint: Callable[[Request], Response]) -> Route:
        return Route(path, endpoint, methods=["POST"])

    routes = [
        Route("/", page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/stream", view.stream),
        Route("/api/groups", view.groups),
        Route("/api/groups/{gid}", view.group),
        Route("/api/dead", view.dead),
        post("/api/pause", view.pause),
        post("/api/continue", view.resume),
        post("/api/groups/{gid}/requeue", view.requeue),
        post("/api/groups/{gid}/drop", view.drop),
    ]
    errors: dict[Any, Any] = {_NoToken: _refuse, RolloutMQError: _report}
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(_SafeHeaders),
        ],
        exception_handlers=errors,
    )


def _model_folders(run: Run, run_dir: Path | None) -> list[Path]:
    """Return the folders that may hold a tokenizer: the run's model, and its newest weights."""
    newest = run.control.state().weights_path
    return [*([run_dir / "model"] if run_dir else []), *([Path(newest)] if newest else [])]


class _SafeHeaders:
    """Adds headers: only our own files are run or shown, and nothing is cached."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SAFE_HEADERS]
            await send(message)

        await self._app(scope, receive, send_safely)


def _answer(document: Any) -> Response:
    return Response(
        orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS), media_type="application/json"
    )


def _refuse(request: Request, error: Exception) -> Response:
    document = {
        "error": "this needs a token",
        "hint": "open the address that `rolloutmq web` printed: it contains the token",
    }
    return JSONResponse(document, status_code=401)


def _report(request: Request, error: RolloutMQError) -> Response:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return JSONResponse({"error": error.message, "hint": error.hint}, status_code=code)


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON: {error}", hint='for example {"status": "completed"}'
        ) from error


def _number(text: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"limit {text[:20]!r} is not a number from 1 to {most}")
    return int(text)
