"""What browsers read of the run as a whole.

GET /api/stream    server-sent events: a snapshot per second (rolloutmq/web/watcher.py)
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rolloutmq.web.access import Access
from rolloutmq.web.answers import encoded
from rolloutmq.web.watcher import Watcher


class RunRoutes:
    """Answers what the charts and the headline show."""

    def __init__(self, watcher: Watcher, access: Access) -> None:
        self._watcher = watcher
        self._access = access

    def all(self) -> list[Route]:
        """Return the routes."""
        return [Route("/api/stream", self._stream)]

    async def _stream(self, request: Request) -> Response:
        self._access.to_read(request)
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        async for snapshot in self._watcher.snapshots():
            if await request.is_disconnected():
                return
            yield b"data: " + encoded(snapshot) + b"\n\n"
