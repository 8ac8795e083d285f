"""What an operator does from a browser, and what is needed to decide it.

GET  /api/dead    dead letters
POST /api/pause?mode=drain|abort|keep  /api/resume
POST /api/groups/{gid}/requeue  /api/groups/{gid}/drop
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from buffer.control.control import Mode
from buffer.errors import ConfigError
from buffer.run import Run
from rolloutmq.web.access import Access
from rolloutmq.web.answers import answer

MOST_LETTERS = 1000


class ControlRoutes:
    """Answers what the control and dead-letter views show, and acts for them."""

    def __init__(self, run: Run, access: Access) -> None:
        self._run = run
        self._access = access

    def all(self) -> list[Route]:
        """Return the routes."""

        def post(path: str, endpoint: Callable[[Request], Response]) -> Route:
            return Route(path, endpoint, methods=["POST"])

        return [
            Route("/api/dead", self._dead),
            post("/api/pause", self._pause),
            post("/api/resume", self._resume),
            post("/api/groups/{gid}/requeue", self._requeue),
            post("/api/groups/{gid}/drop", self._drop),
        ]

    def _dead(self, request: Request) -> Response:
        self._access.to_read(request)
        letters = islice(self._run.dead_letters.newest(), MOST_LETTERS)
        return answer([asdict(letter) for letter in letters])

    def _requeue(self, request: Request) -> Response:
        self._access.to_act(request)
        return answer({"before": self._run.jobs.requeue(request.path_params["gid"])})

    def _drop(self, request: Request) -> Response:
        self._access.to_act(request)
        return answer({"before": self._run.jobs.drop(request.path_params["gid"])})

    def _pause(self, request: Request) -> Response:
        self._access.to_act(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in (Mode.ABORT, Mode.DRAIN, Mode.KEEP):
            raise ConfigError(f"there is no mode {mode!r}", hint="one of abort, drain, keep")
        return answer({"epoch": self._run.control.set_mode("operator", Mode(mode)).epoch})

    def _resume(self, request: Request) -> Response:
        self._access.to_act(request)
        return answer({"epoch": self._run.control.set_mode("operator", Mode.RUN).epoch})
