"""What an operator does from a browser, and what is needed to decide it.

GET  /api/settings                 what `rolloutmq set` can change, with values and ranges
GET  /api/workers/{worker}/events  the newest events that name a worker
POST /api/pause?mode=drain|abort|keep  /api/resume
POST /api/settings?name=NAME&value=VALUE
POST /api/tasks/{task}/resume  /api/workers/{worker}/admit
POST /api/groups/{gid}/requeue  /api/groups/{gid}/drop
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from buffer.control.control import Mode, parse_event
from buffer.control.live_settings import parse_change
from buffer.errors import ConfigError
from buffer.run import Run
from rolloutmq.views.operator_mode import set_operator_mode
from rolloutmq.views.setting_view import live_settings
from rolloutmq.web.access import Access
from rolloutmq.web.answers import answer

SEARCHED_EVENTS = 5_000
"""Newest events among which those of one worker are found."""
SHOWN_EVENTS = 50


class ControlRoutes:
    """Answers what the control view shows, and acts for it."""

    def __init__(self, run: Run, access: Access) -> None:
        self._run = run
        self._access = access

    def all(self) -> list[Route]:
        """Return the routes."""

        def post(path: str, endpoint: Callable[[Request], Response]) -> Route:
            return Route(path, endpoint, methods=["POST"])

        return [
            Route("/api/settings", self._settings, methods=["GET"]),
            Route("/api/workers/{worker}/events", self._worker_events),
            post("/api/pause", self._pause),
            post("/api/resume", self._resume),
            post("/api/settings", self._set),
            post("/api/tasks/{task}/resume", self._resume_task),
            post("/api/workers/{worker}/admit", self._admit),
            post("/api/groups/{gid}/requeue", self._requeue),
            post("/api/groups/{gid}/drop", self._drop),
        ]

    def _settings(self, request: Request) -> Response:
        self._access.to_read(request)
        self._run.refresh_limits()
        return answer([asdict(setting) for setting in live_settings(self._run.limits)])

    def _worker_events(self, request: Request) -> Response:
        self._access.to_read(request)
        worker = request.path_params["worker"]
        run = self._run
        entries: Any = run.store.retrying(
            "events",
            lambda: run.store.control.xrevrange(run.keys.events, count=SEARCHED_EVENTS),
        )
        events = map(parse_event, entries)
        found = [
            {"at_ms": at_ms, "event": name, **fields}
            for at_ms, name, fields in events
            if fields.get("worker") == worker
        ]
        return answer(found[:SHOWN_EVENTS])

    def _pause(self, request: Request) -> Response:
        self._access.to_act(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in (Mode.ABORT, Mode.DRAIN, Mode.KEEP):
            raise ConfigError(f"there is no mode {mode!r}", hint="one of abort, drain, keep")
        return self._hold(Mode(mode))

    def _resume(self, request: Request) -> Response:
        self._access.to_act(request)
        return self._hold(Mode.RUN)

    def _hold(self, mode: Mode) -> Response:
        said: list[str] = []
        state, _ = set_operator_mode(self._run, mode, said.append)
        return answer({"epoch": state.epoch, "said": said})

    def _set(self, request: Request) -> Response:
        self._access.to_act(request)
        query = request.query_params
        assignment = f"{query.get('name', '')}={query.get('value', '')}"
        wanted, restored = parse_change([assignment])
        changes = self._run.set(wanted, restored=restored, by="a browser")
        return answer({"changed": sorted(changes)})

    def _resume_task(self, request: Request) -> Response:
        self._access.to_act(request)
        task = request.path_params["task"]
        if task not in self._run.limits.tasks:
            raise ConfigError(
                f"there is no task {task!r}", hint=f"one of {', '.join(self._run.limits.tasks)}"
            )
        self._run.jobs.resume_task(task)
        return answer({"task": task})

    def _admit(self, request: Request) -> Response:
        self._access.to_act(request)
        return answer({"bad_groups": self._run.fleet.unbar(request.path_params["worker"])})

    def _requeue(self, request: Request) -> Response:
        self._access.to_act(request)
        return answer({"before": self._run.jobs.requeue(request.path_params["gid"])})

    def _drop(self, request: Request) -> Response:
        self._access.to_act(request)
        return answer({"before": self._run.jobs.drop(request.path_params["gid"])})
