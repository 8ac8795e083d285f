"""A judge behind a URL: POST of one rollout as JSON, a reward as JSON back.

Request: response, ground_truth, data_source, messages, extra. Answer: a number, or an object of
numbers with "score". Asked again, with pauses that grow: no connection, no answer in time, 408,
425, 429, 5xx. Any other status is final.

What a judge in another process, or on another machine, is told of a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from buffer.config.task import JudgingSection
from buffer.errors import ConfigError, JudgeError
from buffer.model.rollout import RolloutState
from buffer.store.retry import CHANCE
from producer_workers.judges.judge import check_reward


def rollout_fields(state: RolloutState) -> dict[str, Any]:
    """Its texts, not its token columns; plain JSON where the data set is."""
    return {
        "response": state.response,
        "ground_truth": state.ground_truth,
        "data_source": state.data_source,
        "messages": state.messages,
        "extra": state.extra,
    }


log = logging.getLogger("rolloutmq.judge")

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


class HttpJudge:
    """`judging`: how long one answer may take, and how often it is asked again."""

    def __init__(self, url: str, judging: JudgingSection) -> None:
        try:
            import aiohttp  # noqa: F401 (an extra: said now, not at the first rollout)
        except ImportError as error:
            raise ConfigError(
                f"judge {url} needs aiohttp", hint="pip install 'rolloutmq[http]'"
            ) from error
        self.name = url
        self._judging = judging

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """The checked reward. Raises JudgeError after the last try."""
        body = orjson.dumps(rollout_fields(state), option=orjson.OPT_SERIALIZE_NUMPY)
        pause_s = FIRST_PAUSE_S
        for tries_left in reversed(range(self._judging.retries + 1)):
            try:
                return check_reward(self.name, await self._ask(body))
            except _AgainError as error:
                if not tries_left:
                    raise JudgeError(
                        f"judge {self.name}: {error}",
                        hint="[tasks.<name>.judging] retries, timeout_s",
                    ) from error
                log.warning(
                    "judge %s: %s; asking again, %d tries left", self.name, error, tries_left
                )
            await asyncio.sleep(pause_s * CHANCE.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise AssertionError("unreachable")

    async def _ask(self, body: bytes) -> Any:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._judging.timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self.name, data=body, headers=headers) as answer,
            ):
                said = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _AgainError(f"{type(error).__name__}: {error}") from error
        if answer.status in AGAIN:
            raise _AgainError(f"status {answer.status}")
        if answer.status != 200:
            raise JudgeError(
                f"judge {self.name} refused with status {answer.status}: {said[:200].decode(errors='replace')}"
            )
        try:
            return orjson.loads(said)
        except orjson.JSONDecodeError as error:
            raise JudgeError(f"judge {self.name} answered no JSON: {said[:80]!r}") from error


class _AgainError(Exception):
    """What may be different the next time."""
