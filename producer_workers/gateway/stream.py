"""Stream an answer, and tell the agent while its turn is sampled that it still lasts.

Clients give up after some minutes without an event (Codex: 5), and would ask again for ever. An
answer that begins with such events has the status 200, so a later refusal is an event, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from aiohttp import web

from producer_workers.gateway.dialect import AgentRequest, Json

T = TypeVar("T")

PULSE_S = 10.0  # between two events; sooner refusals have their own status


class TurnStream:
    """The server-sent events that answer one request."""

    def __init__(self, request: web.Request, asked: AgentRequest) -> None:
        self._request = request
        self._asked = asked
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    @property
    def has_begun(self) -> bool:
        return self._response.prepared

    async def wait(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which is over when this call is."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=PULSE_S))[0]:
                await self.write([self._asked.waiting()])
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def write(self, events: Iterable[bytes]) -> web.StreamResponse:
        await self._response.prepare(self._request)
        for event in events:
            await self._response.write(event)
        return self._response

    async def refuse(self, error: Json) -> web.StreamResponse:
        return await self.write([self._asked.failure(error)])
