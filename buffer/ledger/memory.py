"""Payload bytes of a run, compared with its two marks (I12).

Fresh prompts start below the low mark; begun groups (aborted, expired, released) and evaluations
below the high one. No submit is refused: the memory above is room for running groups. The
scripts count bytes that came and went, without those not submitted yet, or waiting in `garbage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from buffer.readable import format_size
from buffer.redis.key_fields import read_counts
from buffer.redis.store import RunContext

FIELDS = ("came", "went")


class ByteCount(NamedTuple):
    """Payload bytes since the run began."""

    came: int
    went: int

    @classmethod
    def parse(cls, key: str, values: Sequence[bytes | None]) -> ByteCount:
        return cls(*read_counts(key, FIELDS, values))

    @property
    def held(self) -> int:
        return self.came - self.went


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The stored payload bytes and the marks; a mark of 0 means no limit."""

    held: int
    low: int
    high: int

    @property
    def refuses_fresh(self) -> bool:
        """Return whether no new prompt may be started."""
        return 0 < self.low <= self.held

    @property
    def refuses_all(self) -> bool:
        """Return whether nothing may be started."""
        return 0 < self.high <= self.held

    def refuses(self, lane: str) -> bool:
        return self.refuses_fresh if lane == "fresh" else self.refuses_all

    def __str__(self) -> str:
        if not self.high:
            return f"{format_size(self.held)} of payloads, no limit"
        held, low, high = (format_size(size) for size in (self.held, self.low, self.high))
        return f"{held} of payloads; new prompts below {low}, begun groups below {high}"


class Memory:
    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, self._limits, _ = context

    def count(self) -> ByteCount:
        bytes_key = self._keys.bytes
        values = self._store.ask("bytes", "HMGET", bytes_key, *FIELDS)
        return ByteCount.parse(bytes_key, values)

    def use(self, count: ByteCount | None = None) -> MemoryUse:
        """Compare the bytes with the marks, now or at a given count."""
        return MemoryUse(
            (count or self.count()).held, self._limits.low_bytes, self._limits.high_bytes
        )
