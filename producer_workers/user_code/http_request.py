"""POST JSON to a service of the user's, again without an answer or after 408, 425, 429 and 5xx."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import orjson

from buffer.errors import AnswerTooLong, JudgeError, NoAnswer, WireError
from buffer.redis.retry import Backoff
from buffer.wire.foreign_json import read_json
from producer_workers.http_client import ask

log = logging.getLogger("rolloutmq.judge")

AWAY = frozenset({429, 502, 503, 504})  # a server that is away, or has no room
RETRIED = AWAY | {408, 425, 500}
BACKOFF = Backoff(0.2, 10.0, jitter=0.5)


@dataclass(frozen=True, slots=True)
class Service:
    """A service that answers JSON with JSON. `what`: its name in errors."""

    what: str
    url: str
    timeout_s: float
    retries: int
    hint: str  # what to do where it does not answer

    async def ask(self, question: object) -> Any:
        """Return the answer to `question`. Raises JudgeError after the last try."""
        body = orjson.dumps(question)
        for attempt in range(self.retries + 1):
            tries_left = self.retries - attempt
            try:
                return await self._post(body)
            except NoAnswer as error:
                if not tries_left:
                    raise JudgeError(f"{self.what}: {error}", hint=self.hint) from error
                log.warning("%s: %s; %d retries left", self.what, error, tries_left)
            # At random, so that the rollouts of a group do not ask at the same moment again.
            await asyncio.sleep(BACKOFF.pause_s(attempt))
        raise AssertionError("unreachable")

    async def _post(self, question: bytes) -> Any:
        import aiohttp

        async with aiohttp.ClientSession() as client:
            answer = await ask(client, "POST", self.url, question, limit_s=self.timeout_s)
        if answer.status in RETRIED:
            raise NoAnswer(f"status {answer.status}")
        if not answer.is_whole:
            raise AnswerTooLong(f"{self.what} {answer.problem}")
        if answer.problem:
            raise JudgeError(f"{self.what} {answer.problem}")
        try:
            return read_json(answer.body, f"the answer of {self.what}")
        except WireError as error:
            raise JudgeError(error.message) from error
