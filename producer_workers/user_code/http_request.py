"""POST JSON to a service of the user's, again without an answer or after 408, 425, 429 and 5xx."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import orjson

from buffer.errors import AnswerTooLong, JudgeError
from buffer.redis.connection.retry import Backoff

log = logging.getLogger("rolloutmq.judge")

LONGEST_ANSWER = 1 << 20  # bytes that are read

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
            except _RetryableError as error:
                if not tries_left:
                    raise JudgeError(f"{self.what}: {error}", hint=self.hint) from error
                log.warning("%s: %s; %d retries left", self.what, error, tries_left)
            # At random, so that the rollouts of a group do not ask at the same moment again.
            await asyncio.sleep(BACKOFF.pause_s(attempt))
        raise AssertionError("unreachable")

    async def _post(self, question: bytes) -> Any:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self.url, data=question, headers=headers) as answer,
            ):
                body = b""
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > LONGEST_ANSWER:
                        raise AnswerTooLong(f"{self.what} sent more than {LONGEST_ANSWER} bytes")
        except TimeoutError as error:
            raise _RetryableError(f"no answer within its limit of {self.timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from error
        if answer.status in RETRIED:
            raise _RetryableError(f"status {answer.status}")
        if answer.status != 200:
            reason = body[:200].decode(errors="replace")
            raise JudgeError(f"{self.what} refused with status {answer.status}: {reason}")
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise JudgeError(f"{self.what}: the answer is not valid JSON: {body[:80]!r}") from error


class _RetryableError(Exception):
    """A failure that may be gone at the next try."""
