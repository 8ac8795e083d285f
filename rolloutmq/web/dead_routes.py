"""What browsers read of dead letters, and do with all of one cause.

GET  /api/dead                       the newest letters, grouped by cause
POST /api/dead/requeue  /api/dead/drop  ?cause=…: all letters of that cause
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from buffer.errors import AccountError, ConfigError
from buffer.groups.dead_letters import DeadLetter
from buffer.run import Run
from rolloutmq.web.access import Access
from rolloutmq.web.answers import answer

MOST_LETTERS = 10_000
"""Letters that one request reads or moves."""
SHOWN_LETTERS = 50
"""Letters of one cause that are listed."""


class DeadRoutes:
    """Answers what the view of dead letters shows, and acts for it."""

    def __init__(self, run: Run, access: Access) -> None:
        self._run = run
        self._access = access

    def all(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/dead", self._dead),
            Route("/api/dead/requeue", self._requeue, methods=["POST"]),
            Route("/api/dead/drop", self._drop, methods=["POST"]),
        ]

    def _letters(self) -> list[DeadLetter]:
        return list(islice(self._run.dead_letters.newest(), MOST_LETTERS))

    def _dead(self, request: Request) -> Response:
        self._access.to_read(request)
        causes: defaultdict[str, list[DeadLetter]] = defaultdict(list)
        letters = self._letters()
        for letter in letters:
            causes[letter.cause].append(letter)
        groups = sorted(causes.items(), key=lambda pair: -len(pair[1]))
        document = {
            "total": len(self._run.dead_letters),
            "read": len(letters),
            "causes": [_described(cause, found) for cause, found in groups],
        }
        return answer(document)

    def _requeue(self, request: Request) -> Response:
        return self._move(request, self._run.jobs.requeue)

    def _drop(self, request: Request) -> Response:
        return self._move(request, self._run.jobs.drop)

    def _move(self, request: Request, move: Callable[[str], str]) -> Response:
        """Move all letters of a cause; one that is not dead any more is left as it is."""
        self._access.to_act(request)
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
        return answer({"moved": moved, "refused": refused})


def _described(cause: str, letters: list[DeadLetter]) -> dict[str, Any]:
    return {
        "cause": cause,
        "count": len(letters),
        "tasks": sorted({letter.task for letter in letters}),
        "workers": sorted({letter.worker for letter in letters if letter.worker}),
        "newest_ms": min(letter.age_ms for letter in letters),
        "letters": [asdict(letter) for letter in letters[:SHOWN_LETTERS]],
    }
