"""What browsers read of the run as a whole, and of runs beside it.

GET /api/runs      the runs whose curves can be shown
GET /api/stream    ?runs=a,b: server-sent events, one per second, with a snapshot of the run
                   (rolloutmq/web/watcher.py) and what was added to the curves of the named runs
GET /api/waits     who waited for whom in the last steps: a lane for the trainer and each worker
GET /api/steps     ?run=a&first=100&last=200: the curves of these steps in detail
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from buffer.errors import ConfigError
from rolloutmq.web.access import Access, encoded, number_in
from rolloutmq.web.series import Mark, RunSeries, run_folders
from rolloutmq.web.watcher import Watcher

MOST_STEPS = 1_000_000_000


class RunRoutes:
    def __init__(self, watcher: Watcher, run_dir: Path | None, access: Access) -> None:
        self._watcher = watcher
        self._run_dir = run_dir
        self._access = access
        self._series: dict[str, RunSeries] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Route]:
        return [
            self._access.reading("/api/runs", self._runs),
            self._access.reading("/api/waits", self._waits),
            self._access.reading("/api/steps", self._steps),
            Route("/api/stream", self._stream),
        ]

    def _runs(self, request: Request) -> Any:
        own = self._run_dir.resolve().name if self._run_dir else None
        return {"own": own, "runs": list(run_folders(self._run_dir))}

    def _waits(self, request: Request) -> Any:
        found = self._watcher.waits()
        return found.document() if found else {"lanes": [], "words": ""}

    def _steps(self, request: Request) -> Any:
        query = request.query_params
        series = self._series_of(query.get("run", ""))
        first, last = (number_in(query.get(name, ""), MOST_STEPS) for name in ("first", "last"))
        with self._lock:
            return series.window(first, last)

    async def _stream(self, request: Request) -> Response:
        self._access.to_read(request)
        names = [name for name in request.query_params.get("runs", "").split(",") if name]
        series = {name: self._series_of(name) for name in names}
        return StreamingResponse(self._events(request, series), media_type="text/event-stream")

    async def _events(self, request: Request, series: dict[str, RunSeries]) -> AsyncIterator[bytes]:
        marks = dict.fromkeys(series, Mark())
        seen_ms = 0
        may_act = self._access.may_act(request)
        async for snapshot in self._watcher.snapshots():
            if await request.is_disconnected():
                return
            live = self._watcher.live.since(seen_ms)
            seen_ms = self._watcher.live.newest_ms
            added = await asyncio.to_thread(self._added, series, marks)
            event = {**snapshot, "may_act": may_act, "live": live, "series": added}
            yield b"data: " + encoded(event) + b"\n\n"

    def _added(self, series: dict[str, RunSeries], marks: dict[str, Mark]) -> dict[str, Any]:
        """Return what was added to the curves since `marks`, by run, and advance these."""
        found = {}
        with self._lock:
            for name, each in series.items():
                each.refresh()
                added, marks[name] = each.since(marks[name])
                if added:
                    found[name] = added
        return found

    def _series_of(self, name: str) -> RunSeries:
        """Return the curves of a run, by the name of its folder. Raises ConfigError."""
        folders = run_folders(self._run_dir)
        if name not in folders:
            raise ConfigError(
                f"there is no run {name[:80]!r} beside this one",
                hint=f"one of {', '.join(folders)}",
            )
        return self._series.setdefault(name, RunSeries(folders[name]))
