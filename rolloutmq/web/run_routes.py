"""What browsers read of the run as a whole, of runs beside it, and of their logs.

GET /api/runs      the runs whose curves can be shown
GET /api/stream    ?runs=a,b: server-sent events, one per second, with a snapshot of the run
                   (rolloutmq/web/watcher.py) and what was added to the curves of the named runs
GET /api/about     config, changed settings, versions, command, note (rolloutmq/views/about_run.py)
GET /api/differences  ?runs=a,b: the keys of the configs that differ
GET /api/panels/{name}  what a panel shows (rolloutmq/web/panels.py)
GET /api/steps     ?run=a&first=100&last=200: the curves of these steps in detail
GET /api/logs      ?process=worker&level=warning&about=math-0000000042&text=…&since=…&until=…
                   &lines=200: server-sent events; the first has the newest lines that match, later
                   ones new lines of the processes on this machine
POST /api/note     ?text=…&tags=a b&seen=0: replaces the note (rolloutmq/views/run_note.py)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from buffer.errors import ConfigError
from buffer.readable import visible
from buffer.run.run import Run
from rolloutmq.config.kept_config import differences
from rolloutmq.options import require_known
from rolloutmq.views.about_run import about_run
from rolloutmq.views.explain.log_files import (
    FIELDS_OF_ALL,
    LEVELS,
    OUTPUT,
    Entry,
    LogFiles,
    LogFilter,
    filter_about,
)
from rolloutmq.views.run_note import read_note, write_note
from rolloutmq.web.access import Access, encoded, number_in
from rolloutmq.web.panels import PANELS, Source
from rolloutmq.web.series import Mark, RunSeries, run_folders
from rolloutmq.web.watcher import Watcher


class RunRoutes:
    def __init__(self, run: Run, watcher: Watcher, run_dir: Path | None, access: Access) -> None:
        self._run = run
        self._watcher = watcher
        self._run_dir = run_dir
        self._access = access
        self._series: dict[str, RunSeries] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Route]:
        return [
            self._access.reading(
                "/api/runs",
                lambda _: {
                    "own": self._run_dir.resolve().name if self._run_dir else None,
                    "runs": list(folders := run_folders(self._run_dir)),
                    "tags": {name: read_note(path).tags for name, path in folders.items()},
                },
            ),
            self._access.reading("/api/about", lambda _: about_run(self._run_dir, self._run)),
            self._access.reading("/api/differences", self._differences),
            self._access.reading("/api/panels/{name}", self._panel),
            self._access.acting("/api/note", self._write_note),
            self._access.reading("/api/steps", self._steps),
            Route("/api/stream", self._stream),
        ]

    def _panel(self, request: Request) -> Any:
        name = request.path_params["name"]
        require_known("panel", name, PANELS)
        return PANELS[name](Source(self._run_dir, self._run, self._watcher.steps))

    def _differences(self, request: Request) -> Any:
        names = _names_in(request)
        return differences({name: self._folder_of(name) for name in names})

    def _write_note(self, request: Request) -> Any:
        if self._run_dir is None:
            raise ConfigError(
                "the folder of this run is not known here, and it has the note",
                hint="start `rolloutmq web` with --run-dir",
            )
        query = request.query_params
        text, tags, seen = (query.get(name, "") for name in ("text", "tags", "seen"))
        seen_ms = number_in(seen, 10**15) if seen else 0
        with self._lock:
            return write_note(self._run_dir, text, tags, seen_ms).model_dump()

    def _steps(self, request: Request) -> Any:
        query = request.query_params
        series = self._series_of(query.get("run", ""))
        first, last = (number_in(query.get(name, ""), 10**9) for name in ("first", "last"))
        with self._lock:
            return series.window(first, last)

    async def _stream(self, request: Request) -> Response:
        self._access.to_read(request)
        series = {name: self._series_of(name) for name in _names_in(request)}
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
        return self._series.setdefault(name, RunSeries(self._folder_of(name)))

    def _folder_of(self, name: str) -> Path:
        """Return the folder of a run by its name. Raises ConfigError."""
        folders = run_folders(self._run_dir)
        if name not in folders:
            raise ConfigError(
                f"there is no run {name[:80]!r} beside this one",
                hint=f"one of {', '.join(folders)}",
            )
        return folders[name]


def _names_in(request: Request) -> list[str]:
    return [name for name in request.query_params.get("runs", "").split(",") if name]


POLL_S = 0.5
MOST_LINES = 1000
# of a line, which then has about 10,000 characters at most
MOST_FIELDS = 20
LONGEST_FIELD = 200
LONGEST_MESSAGE = 2_000
LONGEST_TRACE = 4_000


class LogRoutes:
    def __init__(self, run_dir: Path | None, access: Access, is_over: Callable[[], bool]) -> None:
        self._run_dir = run_dir
        self._access = access
        self._is_over = is_over

    def all(self) -> list[Route]:
        return [Route("/api/logs", self._logs)]

    async def _logs(self, request: Request) -> Response:
        self._access.to_read(request)
        query = request.query_params
        lines = number_in(query.get("lines") or "200", MOST_LINES)
        if self._run_dir is None:
            raise ConfigError(
                "the folder of this run is not known here, nor are its logs",
                hint="start `rolloutmq web` with --run-dir on the machine of its processes",
            )
        if (level := query.get("level", "")) and level not in LEVELS:
            raise ConfigError(f"{level[:20]!r} is no level", hint=f"one of {', '.join(LEVELS)}")
        about = await asyncio.to_thread(filter_about, self._run_dir, query.get("about", ""))
        text, since, until = (query.get(name, "") for name in ("text", "since", "until"))
        wanted = replace(about, level=level, text=text, since=since, until=until)
        files = LogFiles(self._run_dir / "logs", query.get("process", ""))
        events = self._events(request, files, wanted, lines)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, request: Request, files: LogFiles, wanted: LogFilter, lines: int
    ) -> AsyncIterator[bytes]:
        found = await asyncio.to_thread(files.last, lines, wanted)
        processes = [name for role in ("", OUTPUT) for name in LogFiles(files.folder, role).roles]
        yield await asyncio.to_thread(_event, found, processes=processes, is_cut=files.is_cut)
        while not self._is_over() and not await request.is_disconnected():
            if found := await asyncio.to_thread(files.new, wanted):
                yield await asyncio.to_thread(_event, found[-MOST_LINES:])
            await asyncio.sleep(POLL_S)


def _event(entries: list[Entry], **more: Any) -> bytes:
    return b"data: " + encoded({"lines": [_line(entry) for entry in entries], **more}) + b"\n\n"


def _line(entry: Entry) -> dict[str, Any]:
    """Return a line with texts only, so that its fields can be of any kind."""
    fields = entry.fields
    own = [(name, value) for name, value in fields.items() if name not in FIELDS_OF_ALL]
    return {
        "time": entry.time[:40],
        "process": entry.role,
        "level": entry.level if fields else "",
        "message": _cut(fields.get("message", entry.line), LONGEST_MESSAGE),
        "exception": _cut(fields.get("exception", ""), LONGEST_TRACE),
        "fields": {_cut(n, 40): _cut(value, LONGEST_FIELD) for n, value in own[:MOST_FIELDS]},
    }


def _cut(value: object, most: int) -> str:
    """Return a text with visible control characters, without its middle if it is too long."""
    # cut twice: `visible` is slow, and makes a text longer
    return _ends(visible(_ends(str(value), most)), most)


def _ends(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
