"""Serve a run to browsers (Starlette): a page without a build step, JSON, and server-sent events.

`/` is the page, `/static/…` its scripts and styles; modules named *_routes list `/api/…`. A request
for an unknown `Host` is refused, so no page elsewhere can read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from buffer.errors import ConfigError
from buffer.run.run import Run
from consumer.handle.sample_log import SampleLog, TokenTexts, model_folders
from rolloutmq.views.found_group import FoundGroup
from rolloutmq.views.history import History
from rolloutmq.web.access import ERRORS, Access
from rolloutmq.web.group_routes import ControlRoutes, GroupRoutes, logged_samples, with_token_texts
from rolloutmq.web.report import read_contents
from rolloutmq.web.run_routes import LogRoutes, RunRoutes
from rolloutmq.web.watcher import Watcher

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors "
    "'none'; base-uri 'none'"
)
SAFE_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)


def make_app(
    run: Run,
    *,
    run_dir: Path | None,
    access: Access,
    hosts: list[str],
    is_over: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Return the application for the names `hosts`; streams end when `is_over` returns True."""
    watcher = Watcher(run, History(run_dir), is_over)
    texts = TokenTexts(model_folders(run, run_dir))
    routes = [
        *RunRoutes(run, watcher, run_dir, access).all(),
        *LogRoutes(run_dir, access, is_over).all(),
        *GroupRoutes(run, texts, SampleLog(run_dir) if run_dir else None).all(access),
        *ControlRoutes(run, run_dir).all(access),
    ]

    @asynccontextmanager
    async def recording(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(watcher.keep_record())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return _application(routes, hosts, recording)


def make_folder_app(
    run_dir: Path,
    why: str,
    *,
    access: Access,
    hosts: list[str],
    is_over: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Return the application for a run whose server is lost, from its folder; `why` it is lost."""
    samples, texts = SampleLog(run_dir), TokenTexts([run_dir / "model"])

    def contents(request: Request) -> Any:
        saved = read_contents(run_dir)
        saved["about"]["facts"]["not read"] = f"this is read from the run's folder alone: {why}"
        return {"own": saved["run"], "runs": [saved["run"]], "saved": saved}

    def group(request: Request) -> Any:
        gid = request.path_params["gid"]
        sample = samples.find(gid, tokens=True)
        if sample is None:
            raise ConfigError(f"the run's folder has no sample of {gid[:80]}", hint=why)
        return with_token_texts(FoundGroup(gid, sample=sample), texts)

    routes = [
        access.reading("/api/runs", contents),
        access.reading("/api/samples", partial(logged_samples, samples)),
        access.reading("/api/groups/{gid}", group),
        *LogRoutes(run_dir, access, is_over).all(),
    ]
    return _application(routes, hosts)


def _application(routes: list[Route], hosts: list[str], lifespan: Any = None) -> Starlette:
    return Starlette(
        routes=[
            Route("/", lambda _: FileResponse(STATIC / "page.html")),
            Mount("/static", StaticFiles(directory=STATIC)),
            *routes,
        ],
        lifespan=lifespan,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(_SafeHeaders),
        ],
        exception_handlers=ERRORS,
    )


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
