"""The HTTP side of the browser's view (Starlette): a page without a build step, JSON, and
server-sent events.

    GET  /                     the page; /static/… its script and style
    GET  /api/stream           server-sent events: a look a second (rolloutmq/web/watcher.py)
    GET  /api/groups           ?where=JSON&order=-tokens&limit=100: the query language of buffer/query
    GET  /api/groups/{gid}     one group with its tokens
    GET  /api/dead             dead letters
    POST /api/pause  /api/continue  /api/groups/{gid}/requeue  /api/groups/{gid}/drop      want the token

Reading is free on loopback. Acting always wants the token, in a header that no other site can send
(so that no page elsewhere can act in a browser's name); a `Host` that is not ours is refused (so
that no page elsewhere can read).
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
from buffer.model.ids import split_group_id
from buffer.model.job import PayloadRef
from buffer.monitoring.history import History
from buffer.monitoring.http_endpoint import carries
from buffer.monitoring.json_views import group_json
from buffer.monitoring.tracing import trace_id
from buffer.run import Run
from rolloutmq.web.watcher import TokenTexts, Watcher

STATIC = Path(__file__).parent / "static"
MOST_ROWS = 1000
POLICY = "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
SAFE_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
_STATUS = {ConfigError: 400, RunNotFound: 404, AccountError: 404, StoreUnavailable: 503}


class RunView:
    """What a browser may ask of one run. Methods that act check the token first."""

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
        async for look in self._watcher.looks():
            if await request.is_disconnected():
                return
            yield b"data: " + orjson.dumps(look, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"

    def groups(self, request: Request) -> Response:
        self._admit(request, acts=False)
        asked: Mapping[str, str] = request.query_params
        where = _json(asked.get("where") or "{}")
        limit = _number(asked.get("limit") or "100", MOST_ROWS)
        rows = self._run.groups.find(where, limit=limit, order=asked.get("order") or "")
        return _answer([asdict(row) for row in rows])

    def group(self, request: Request) -> Response:
        self._admit(request, acts=False)
        gid = request.path_params["gid"]
        task, draw = split_group_id(gid)
        if task not in self._run.limits.tasks:
            raise ConfigError(
                f"there is no task {task!r}", hint=f"one of {', '.join(self._run.limits.tasks)}"
            )
        record = self._run.record(gid)
        places = self._run.account.places(task, draw)
        told = {
            "gid": gid,
            "places": places,
            "record": record,
            "dead_letter": self._run.dead_letters.reason(gid),
        }
        told["trace_id"] = trace_id(self._run.nonce, gid)
        return _answer(told | (self._members(gid, record) if record else {"members": []}))

    def _members(self, gid: str, record: dict[str, str]) -> dict[str, Any]:
        crc = "" if record["payload"] == "init" else record.get("crc", "")
        size = int(record.get("size") or 0) if crc else 0
        group = self._run.buffer.read(
            PayloadRef(gid, record["payload"], int(record["chunks"]), size, crc)
        )
        told = group_json(group, group.states, tokens=True)
        for member in told["members"]:
            member["token_texts"] = self._texts.of(member["response_ids"])
        return told

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
            raise ConfigError(f"there is no mode {mode!r}", hint="abort, drain or keep")
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
    """The request carries no token, or another one."""


def make_app(
    run: Run,
    *,
    run_dir: Path | None,
    token: str,
    hosts: list[str],
    read_needs_token: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The application. `hosts`: names under which it may be asked for; `is_over`: when streams end."""
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
    errors: dict[Any, Any] = {_NoToken: _refuse, RolloutMQError: _tell}
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(_SafeHeaders),
        ],
        exception_handlers=errors,
    )


def _model_folders(run: Run, run_dir: Path | None) -> list[Path]:
    """The run's own model, and what workers loaded last: the model it began with, or newer weights."""
    newest = run.control.state().weights_path
    return [*([run_dir / "model"] if run_dir else []), *([Path(newest)] if newest else [])]


class _SafeHeaders:
    """Nothing but our own files is run or shown, and nothing is cached."""

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
    told = {
        "error": "a token is wanted",
        "hint": "the command that serves this page printed an address with one",
    }
    return JSONResponse(told, status_code=401)


def _tell(request: Request, error: RolloutMQError) -> Response:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return JSONResponse({"error": error.message, "hint": error.hint}, status_code=code)


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"this is no JSON: {error}", hint='for example {"status": "completed"}'
        ) from error


def _number(text: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"limit {text[:20]!r}", hint=f"1 to {most}")
    return int(text)
