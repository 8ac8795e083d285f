"""What browsers read of groups and rollouts.

GET /api/groups          ?where=JSON&order=-tokens&limit=100, see buffer/query
GET /api/groups/{gid}    one group with its tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from buffer.monitoring.found_group import find_group
from buffer.monitoring.token_texts import TokenTexts
from buffer.run import Run
from rolloutmq.web.access import Access
from rolloutmq.web.answers import answer, json_in, number_in

MOST_ROWS = 1000


class GroupRoutes:
    """Answers what the rollouts page shows."""

    def __init__(self, run: Run, texts: TokenTexts, access: Access) -> None:
        self._run = run
        self._texts = texts
        self._access = access

    def all(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/groups", self._groups),
            Route("/api/groups/{gid}", self._group),
        ]

    def _groups(self, request: Request) -> Response:
        self._access.to_read(request)
        query: Mapping[str, str] = request.query_params
        where = json_in(query.get("where") or "{}")
        limit = number_in(query.get("limit") or "100", MOST_ROWS)
        rows = self._run.groups.find(where, limit=limit, order=query.get("order") or "")
        return answer([asdict(row) for row in rows])

    def _group(self, request: Request) -> Response:
        self._access.to_read(request)
        found = find_group(self._run, request.path_params["gid"])
        document = found.document(tokens=True)
        for member in document["members"]:
            member["token_texts"] = self._texts.of(member["response_ids"])
        return answer(document)
