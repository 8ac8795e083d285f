"""A judge that is not asked again about what it, or another worker's, has judged before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

import orjson

from buffer.groups.verdicts import Verdicts
from buffer.wire.columns import all_columns
from buffer.wire.rollout import RolloutState
from producer_workers.judges.judge import Judge, rollout_fields

READ = (
    "response", "finish_reason", "ground_truth", "data_source", "messages", "tool_calls", "extra",
)  # fmt: skip
"""Fields of a rollout that tell apart what a judge reads; tokens and rewards are in none."""


def digest_of(*read: object) -> str:
    """Return the digest of what a judge is and reads, as hexadecimal digits."""
    text = orjson.dumps(read, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return blake2b(text, digest_size=16).hexdigest()


class CachedJudge(Judge):
    """Asks `judge` unless its verdict is known. Answers with columns are not kept."""

    def __init__(self, judge: Judge, verdicts: Verdicts) -> None:
        self.name = judge.name
        self.sees_group = judge.sees_group
        self._judge = judge
        self._verdicts = verdicts
        self._identity = judge.identity()

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        read = [[rollout_fields(state)[name] for name in READ] for state in states]
        digest = digest_of(self._identity, read)
        if known := await asyncio.to_thread(self._verdicts.find, digest):
            kept: list[dict[str, float]] = orjson.loads(known)
            return kept
        self._verdicts.use.calls += 1
        before = _columns(states)
        rewards = await self._judge.ask(states)
        is_plain = _columns(states) == before
        verdict = orjson.dumps(rewards, option=orjson.OPT_SERIALIZE_NUMPY) if is_plain else b""
        await asyncio.to_thread(self._verdicts.note, digest, verdict)
        return rewards

    def close(self) -> None:
        self._judge.close()


def _columns(states: Sequence[RolloutState]) -> list[list[str]]:
    return [[c.name for c in all_columns() if c.get(state) is not None] for state in states]
