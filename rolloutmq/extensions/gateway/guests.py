"""Limit the requests of an agent, and keep its last answers, until its key ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from aiohttp import web

from buffer.errors import RolloutMQError
from rolloutmq.extensions.gateway.agent_sessions import AgentSessions
from rolloutmq.extensions.gateway.turn import SampledTurn

LARGEST_REQUEST = 32 * 2**20  # bytes; a request carries a whole conversation

# Requests of one key; its clients send more of them again later.
MOST_AT_ONCE = 128
MOST_PER_S = 100
MOST_BYTES = 4 * LARGEST_REQUEST  # at once

# The header with which the clients of OpenAI and Anthropic count attempts of one request.
RETRIES = "x-stainless-retry-count"


class Refusal(RolloutMQError):
    """A request is not answered; `field`: the field that is at fault; `location`: where it is."""

    def __init__(
        self, status: int, message: str, code: str, field: str | None = None, location: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self._location = location

    @property
    def headers(self) -> dict[str, str]:
        if self._location:
            return {"Location": self._location}
        if self.status == 429 or self.code == "moved":
            return {"Retry-After": "1"}
        return {"x-should-retry": "false"}  # clients would retry, and be refused again


@dataclass(slots=True)
class Guest:
    """An agent that has a key: its sessions, its open requests, and its last answers.

    Answers are kept by the hashes of their requests.
    """

    sessions: AgentSessions
    requests: dict[asyncio.Task[Any], int] = field(default_factory=dict)  # with their bytes
    paid_until: float = 0.0  # each request moves this on by its share of a second
    put_off: int = 0  # requests that were refused for now, and will be asked again
    answered: dict[bytes, SampledTurn] = field(default_factory=dict)
    unsent: dict[bytes, SampledTurn] = field(default_factory=dict)  # their connections broke

    def check_rate(self) -> None:
        """Count a request. Raises Refusal."""
        now = time.monotonic()
        until = max(self.paid_until, now - 1.0) + 1.0 / MOST_PER_S
        if until > now:
            self._put_off(f"more than {MOST_PER_S} requests of this key in a second")
        self.paid_until = until

    @contextmanager
    def asking(self, request: web.Request) -> Iterator[None]:
        """Cancel `request` with the key. Raises Refusal."""
        is_packed = "Content-Encoding" in request.headers
        told = None if is_packed else request.content_length
        size = min(told or LARGEST_REQUEST, LARGEST_REQUEST)  # a larger one is refused as it comes
        if len(self.requests) >= MOST_AT_ONCE or size + sum(self.requests.values()) > MOST_BYTES:
            self._put_off(f"more than {MOST_AT_ONCE} requests of this key, or {MOST_BYTES} bytes")
        answering = asyncio.current_task()
        assert answering is not None
        self.requests[answering] = size
        try:
            yield
        finally:
            del self.requests[answering]

    def answer_again(self, request: web.Request, asked: bytes) -> SampledTurn | None:
        """Return the answer that a client may not have received; None if it asks for another."""
        is_repeated = request.headers.get(RETRIES, "0") != "0"
        if is_repeated and self.put_off:  # it repeats a request that was refused
            self.put_off -= 1
            is_repeated = False
        return self.unsent.pop(asked, None) or (self.answered.get(asked) if is_repeated else None)

    def _put_off(self, why: str) -> NoReturn:
        self.put_off += 1
        raise Refusal(429, why, "rate_limit_exceeded")


def keep(answers: dict[bytes, SampledTurn], asked: bytes, turn: SampledTurn) -> None:
    answers[asked] = turn
    if len(answers) > MOST_AT_ONCE:
        del answers[next(iter(answers))]
