"""Ask servers that others run, within bounds: of time, of bytes, and of where a request goes.

Redirections are not followed. They would take a request, with its key, to whichever host the server
names.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import orjson

from buffer.errors import AnswerTooLong, JudgeError, NoAnswer, ServiceAway, WireError
from buffer.redis.retry import Backoff
from buffer.wire.foreign_json import read_json
from producer_workers.call_turns import Turns

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("rolloutmq.judge")

LONGEST_ANSWER = 1 << 20  # bytes that are read, unless a caller expects more

LONGEST_REASON = 300  # bytes of a refusal that are told


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class HttpAnswer(NamedTuple):
    """What a server answered. `body` is cut if not `is_whole`; that of a redirection says where to.

    `retry_after_s`: for how long a server that refuses asks to wait; 0: it does not say.
    """

    status: int
    body: bytes
    is_whole: bool
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, answer: aiohttp.ClientResponse, body: bytes, *, is_whole: bool = True) -> Self:
        if answer.status // 100 == 3 and (location := answer.headers.get("Location")):
            body = f"it points to {location:.200}; set this address if you trust it".encode()
        return cls(answer.status, body, is_whole, retry_after_s(answer.headers))

    @property
    def problem(self) -> str:
        """Return why the answer cannot be used, behind the name of its server; "" if it can."""
        if not 200 <= self.status < 300:
            said = self.body[:LONGEST_REASON].decode(errors="replace")
            return f"refused with status {self.status}: {said}"
        return "" if self.is_whole else f"sent more than {len(self.body)} bytes"


async def ask(
    client: aiohttp.ClientSession,
    verb: str,
    url: str,
    data: bytes | None = None,
    *,
    limit_s: float | None,
    most: int = LONGEST_ANSWER,
) -> HttpAnswer:
    """Return the answer to a request, whatever its status, with at most `most` bytes of its body.

    `data` is JSON. Raises ServiceAway if the server cannot be reached, and NoAnswer after `limit_s`
    seconds, or if the connection breaks.
    """
    import aiohttp

    headers = {"Content-Type": "application/json"} if data is not None else {}
    limit = aiohttp.ClientTimeout(total=limit_s)
    body = bytearray()
    try:
        async with client.request(
            verb, url, data=data, headers=headers, timeout=limit, allow_redirects=False
        ) as answer:
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > most:  # leaving closes the connection
                    break
    except aiohttp.ClientConnectorError as error:
        raise ServiceAway(f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise NoAnswer(f"no answer within its limit of {limit_s:g} s") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise NoAnswer(f"{type(error).__name__}: {error}") from error
    return HttpAnswer.of(answer, bytes(body[:most]), is_whole=len(body) <= most)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds, 0 to 3600, of Retry-After, which may be a date (RFC 9110, 10.2.3)."""
    said = headers.get("Retry-After", "").strip()
    try:
        is_date = not said[:1].isdigit()
        left_s = parsedate_to_datetime(said).timestamp() - time.time() if is_date else float(said)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(left_s, 0.0), 3600.0)


TOO_MANY = 429
AWAY = frozenset({TOO_MANY, 502, 503, 504})  # a server that is away, or has no room
RETRIED = AWAY | {408, 425, 500}
WARNING_EVERY_S = 10.0  # of one service
BACKOFF = Backoff(0.2, 10.0, jitter=0.5)
_USAGE = re.compile(rb'"total_tokens"\s*:\s*(\d{1,9})')  # of an answer of the OpenAI API


@dataclass(slots=True)
class Service:
    """A service that answers JSON with JSON. `what`: its name in errors.

    It is asked again without an answer, and after 408, 425, 429 and 5xx. `headers`: may have a key.
    Under a limit, each question waits for one of the `turns`, and a refusal by 429 is no failure.
    """

    what: str
    url: str
    timeout_s: float
    retries: int
    hint: str  # what to do where it does not answer
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    turns: Turns | None = None
    _warned_at: float = field(default=float("-inf"), init=False)

    async def ask(self, question: object, tokens: int = 0) -> Any:
        """Return the answer to `question`, which uses at most `tokens`.

        Raises JudgeError after the last try.
        """
        import aiohttp

        body, failed = orjson.dumps(question), 0
        while True:
            limited = self.turns.turn(tokens) if self.turns else nullcontext()
            try:
                async with limited as turn, aiohttp.ClientSession(headers=self.headers) as client:
                    answer = await ask(client, "POST", self.url, body, limit_s=self.timeout_s)
                    if turn and answer.status == TOO_MANY:  # asked again once everybody may ask
                        turn.refused(answer.retry_after_s, f"{self.what} {answer.problem}")
                        continue
                    if turn and tokens and (used := _USAGE.search(answer.body)):
                        turn.used(int(used[1]))
                if answer.status not in RETRIED:
                    break
                raise NoAnswer(f"status {answer.status}")
            except NoAnswer as error:
                failed += 1
                if failed > self.retries:
                    raise JudgeError(f"{self.what}: {error}", hint=self.hint) from error
                # hundreds of calls may fail at once
                if time.monotonic() - self._warned_at > WARNING_EVERY_S:
                    self._warned_at = time.monotonic()
                    log.warning("%s: %s; try %d of %d", self.what, error, failed, self.retries + 1)
            # At random, so that the rollouts of a group do not ask at the same moment again.
            await asyncio.sleep(BACKOFF.pause_s(failed - 1))
        if answer.problem:
            kind = JudgeError if answer.is_whole else AnswerTooLong
            raise kind(f"{self.what} {answer.problem}")
        try:
            return read_json(answer.body, f"the answer of {self.what}")
        except WireError as error:
            raise JudgeError(error.message) from error
