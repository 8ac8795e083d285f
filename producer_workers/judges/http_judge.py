"""Judge with a service behind a URL: POST of one rollout as JSON, a reward as JSON back.

Request: index, response, finish_reason, ground_truth, data_source, messages, tool_calls, reward (of
the environment, so far), extra, response_ids and response_mask (null: the model sampled all of
them). Answer: a number, or an object of numbers with "score", which may also have token columns
(`TOKEN_COLUMNS`), arrays with one number for each of response_ids. The request is repeated, with
growing pauses, for: no connection, no answer in time, 408, 425, 429, 5xx. Any other status is
final.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from buffer.config.task import JudgingSection
from buffer.errors import ConfigError, JudgeError
from buffer.rollouts.rollout import RolloutState
from buffer.store.retry import Backoff
from producer_workers.judges.judge import rollout_fields
from producer_workers.judges.token_columns import take_columns
from producer_workers.user_code.checked_result import check_answer

log = logging.getLogger("rolloutmq.judge")

LONGEST_ANSWER = 1 << 20
"""Bytes of the longest answer that is read."""

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
BACKOFF = Backoff(0.2, 10.0, jitter=0.5)


class HttpJudge:
    """Judges at one URL. `judging` limits the time of an answer and the number of retries."""

    def __init__(self, url: str, judging: JudgingSection) -> None:
        try:
            import aiohttp  # noqa: F401 (an extra: it fails at the start, not at a rollout)
        except ImportError as error:
            raise ConfigError(
                f"judge {url} needs aiohttp", hint="pip install 'rolloutmq[http]'"
            ) from error
        self.name = url
        self._judging = judging

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the checked reward. Raises JudgeError after the last try."""
        body = orjson.dumps(rollout_fields(state))
        for attempt in range(self._judging.retries + 1):
            tries_left = self._judging.retries - attempt
            try:
                answer = check_answer(self.name, await self._ask(body))
                return take_columns(self.name, state, answer)
            except _RetryableError as error:
                if not tries_left:
                    raise JudgeError(
                        f"judge {self.name}: {error}",
                        hint="check the service, or raise [tasks.<name>.judging] timeout_s",
                    ) from error
                log.warning("judge %s: %s; %d retries left", self.name, error, tries_left)
            # At random, so that the rollouts of a group do not ask at the same moment again.
            await asyncio.sleep(BACKOFF.pause_s(attempt))
        raise AssertionError("unreachable")

    async def _ask(self, rollout: bytes) -> Any:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._judging.timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self.name, data=rollout, headers=headers) as answer,
            ):
                body = b""
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > LONGEST_ANSWER:
                        raise JudgeError(f"judge {self.name} sent more than {LONGEST_ANSWER} bytes")
        except TimeoutError as error:
            limit_s = self._judging.timeout_s
            raise _RetryableError(f"no answer within its limit of {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from error
        if answer.status in RETRIED:
            raise _RetryableError(f"status {answer.status}")
        if answer.status != 200:
            reason = body[:200].decode(errors="replace")
            raise JudgeError(f"judge {self.name} refused with status {answer.status}: {reason}")
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise JudgeError(
                f"judge {self.name}: the answer is not valid JSON: {body[:80]!r}"
            ) from error


class _RetryableError(Exception):
    """A failure that may be gone at the next try."""
