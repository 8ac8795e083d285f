"""What an operator does from a browser, and what is needed to decide it.

GET  /api/settings                 what `rolloutmq set` can change, with values and ranges
GET  /api/workers/{worker}/events  the newest events that name a worker
GET  /api/dead                     the newest dead letters, grouped by cause
POST /api/pause?mode=drain|abort|keep  /api/resume
POST /api/settings?name=NAME&value=VALUE
POST /api/tasks/{task}/resume  /api/workers/{worker}/admit
POST /api/groups/{gid}/requeue  /api/groups/{gid}/drop
POST /api/dead/requeue  /api/dead/drop  ?cause=…: all letters of that cause
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from buffer.control.control import Mode
from buffer.control.live_settings import parse_change
from buffer.errors import AccountError, ConfigError
from buffer.groups.dead_letters import DeadLetter
from buffer.run import Run
from rolloutmq.options import require_known
from rolloutmq.views.operator_mode import set_operator_mode
from rolloutmq.views.run_folder import letters_by_cause
from rolloutmq.views.setting_view import live_settings
from rolloutmq.web.access import Access

SEARCHED_EVENTS = 5_000  # newest events among which those of one worker are found
SHOWN_EVENTS = 50
MOST_LETTERS = 10_000  # letters that one request reads or moves


class ControlRoutes:
    def __init__(self, run: Run) -> None:
        self._run = run

    def all(self, access: Access) -> list[Route]:
        jobs, fleet = self._run.jobs, self._run.fleet
        return [
            access.reading("/api/settings", self._settings),
            access.reading("/api/workers/{worker}/events", self._worker_events),
            access.reading("/api/dead", self._dead),
            access.acting("/api/pause", self._pause),
            access.acting("/api/resume", lambda _: self._hold(Mode.RUN)),
            access.acting("/api/settings", self._set),
            access.acting("/api/tasks/{task}/resume", self._resume_task),
            access.acting(
                "/api/workers/{worker}/admit",
                lambda request: {"bad_groups": fleet.unbar(request.path_params["worker"])},
            ),
            access.acting("/api/groups/{gid}/requeue", _of_group(jobs.requeue)),
            access.acting("/api/groups/{gid}/drop", _of_group(jobs.drop)),
            access.acting("/api/dead/requeue", lambda request: self._move(request, jobs.requeue)),
            access.acting("/api/dead/drop", lambda request: self._move(request, jobs.drop)),
        ]

    def _settings(self, request: Request) -> Any:
        self._run.refresh_limits()
        return [asdict(setting) for setting in live_settings(self._run.limits)]

    def _worker_events(self, request: Request) -> Any:
        found = [
            {"at_ms": at_ms, "event": name, **fields}
            for at_ms, name, fields in reversed(self._run.events.last(SEARCHED_EVENTS))
            if fields.get("worker") == request.path_params["worker"]
        ]
        return found[:SHOWN_EVENTS]

    def _pause(self, request: Request) -> Any:
        mode = request.query_params.get("mode", "abort")
        require_known("mode", mode, (Mode.ABORT, Mode.DRAIN, Mode.KEEP))
        return self._hold(Mode(mode))

    def _hold(self, mode: Mode) -> Any:
        said: list[str] = []
        state, _ = set_operator_mode(self._run, mode, said.append)
        return {"epoch": state.epoch, "said": said}

    def _set(self, request: Request) -> Any:
        query = request.query_params
        assignment = f"{query.get('name', '')}={query.get('value', '')}"
        wanted, restored = parse_change([assignment])
        return {"changed": sorted(self._run.set(wanted, restored=restored, by="a browser"))}

    def _resume_task(self, request: Request) -> Any:
        task = request.path_params["task"]
        require_known("task", task, self._run.limits.tasks)
        self._run.jobs.resume_task(task)
        return {"task": task}

    # -- dead letters ----------------------------------------------------------

    def _letters(self) -> list[DeadLetter]:
        return list(islice(self._run.dead_letters.newest(), MOST_LETTERS))

    def _dead(self, request: Request) -> Any:
        return letters_by_cause(self._letters(), len(self._run.dead_letters))

    def _move(self, request: Request, move: Callable[[str], str]) -> Any:
        """Move all letters of a cause; skip those that are no longer dead."""
        cause = request.query_params.get("cause")
        if cause is None:
            raise ConfigError("name a cause", hint="GET /api/dead lists them")
        moved = refused = 0
        for letter in self._letters():
            if letter.cause != cause:
                continue
            try:
                move(letter.gid)
                moved += 1
            except AccountError:
                # another operator was quicker
                refused += 1
        return {"moved": moved, "refused": refused}


def _of_group(move: Callable[[str], str]) -> Callable[[Request], Any]:
    return lambda request: {"before": move(request.path_params["gid"])}
