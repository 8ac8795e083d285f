"""Answer a request; while its turn is sampled, send events to a client that asked for a stream.

Clients give up after some minutes without an event (Codex: 5), and would ask again for ever. An
answer that begins with such events has the status 200, so a later refusal is an event, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from aiohttp import web

from rolloutmq.extensions.gateway.dialects.dialect import AgentRequest, Json
from rolloutmq.extensions.gateway.turn import SampledTurn

T = TypeVar("T")

PULSE_S = 10.0  # between two events; sooner refusals have their own status


class Reply:
    """The answer to one request: a body, or server-sent events if it asks for a stream."""

    def __init__(self, request: web.Request, asked: AgentRequest) -> None:
        self._request = request
        self._asked = asked
        self._stream = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    @property
    def has_begun(self) -> bool:
        return self._stream.prepared

    async def wait(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which is over when this call is."""
        task = asyncio.ensure_future(work)
        try:
            while self._asked.stream and not (await asyncio.wait([task], timeout=PULSE_S))[0]:
                await self._write([self._asked.waiting()])
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def send(self, turn: SampledTurn, pieces: list[str]) -> web.StreamResponse:
        """Write the turn; `pieces` are the texts of its tokens, for logprobs."""
        if self._asked.stream:
            return await self._write(self._asked.events(turn, pieces))
        body = web.json_response(self._asked.answer(turn, pieces))
        await body.prepare(self._request)
        await body.write_eof()
        return body

    async def refuse(self, error: Json) -> web.StreamResponse:
        """End a stream that has begun."""
        return await self._write([self._asked.failure(error)])

    async def _write(self, events: Iterable[bytes]) -> web.StreamResponse:
        await self._stream.prepare(self._request)
        for event in events:
            await self._stream.write(event)
        return self._stream
