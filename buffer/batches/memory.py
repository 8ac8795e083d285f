"""Payload bytes of a run against its two marks (I12).

Fresh prompts are started and claimed below the low mark, groups that were begun (aborted, expired,
handed back) and evaluations below the high one. Nothing is ever refused at submit: what lies above
the high mark is room for the results of what runs. The bytes are counted by the scripts that move
the groups, as two absolute numbers: what came, what went. Bytes that are not handed in yet, and
those that wait in `garbage` to be freed, are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from buffer.batches.archive import Archive
from buffer.groups.record_walk import RecordWalk
from buffer.model.byte_size import format_size
from buffer.model.limits import RunLimits
from buffer.store.keys import Keys
from buffer.store.store import Store

FIELDS = ("came", "went")


class ByteCount(NamedTuple):
    """Cumulative payload bytes."""

    came: int
    went: int

    @classmethod
    def parse(cls, values: Sequence[bytes | None]) -> ByteCount:
        """From FIELDS of `bytes`."""
        came, went = (int(value or 0) for value in values)
        return cls(came, went)

    @property
    def held(self) -> int:
        return self.came - self.went


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Payload bytes held, and the marks; a mark of 0 does not exist."""

    held: int
    low: int
    high: int

    @property
    def refuses_fresh(self) -> bool:
        """Whether no new prompt may be started."""
        return 0 < self.low <= self.held

    @property
    def refuses_all(self) -> bool:
        """Whether nothing may be started."""
        return 0 < self.high <= self.held

    def refuses(self, lane: str) -> bool:
        """Whether no group of that lane may be started."""
        return self.refuses_fresh if lane == "fresh" else self.refuses_all

    def __str__(self) -> str:
        if not self.high:
            return f"{format_size(self.held)} of payloads, no bound"
        marks = f"new prompts below {format_size(self.low)}, begun groups below {format_size(self.high)}"
        return f"{format_size(self.held)} of payloads; {marks}"


class Memory:
    """The byte account of one run."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    def count(self) -> ByteCount:
        bytes_key = self._keys.bytes
        return ByteCount.parse(
            self._store.retrying("bytes", lambda: self._store.control.hmget(bytes_key, *FIELDS))
        )

    def use(self, count: ByteCount | None = None) -> MemoryUse:
        """Where the run stands now, or stood at that count."""
        return MemoryUse(
            (count or self.count()).held, self._limits.low_bytes, self._limits.high_bytes
        )

    def faults(self) -> list[str]:
        """Whether the count is what the records say. Works on a live run, where it is a range: what
        was held all the time is seen once, what came or went meanwhile once or never. O(living
        groups).
        """
        before = self.count()
        weighed = self.weigh()
        after = self.count()
        least = before.came - after.went
        most = after.came - before.went
        if least <= weighed <= most:
            return []
        return [
            f"{before.held} payload bytes are counted, {weighed} are in the records ({least} to {most} may be)"
        ]

    def weigh(self) -> int:
        """Bytes of all records, then those of archived batches that are retained: a group that was
        archived in between is not counted again.
        """
        walk = RecordWalk(self._store, self._keys)
        total = 0
        seen = set()
        for task in self._limits.tasks:
            for gid, record in walk.records(task):
                total += int(record.get("prompt", 0))
                if record["payload"] != "init":
                    total += int(record["size"])
                    seen.add(gid)
        for name in ("train", "eval"):
            entries = Archive(self._store, self._keys, self._limits, name).entries()
            total += sum(entry.payload.size for entry in entries if entry.gid not in seen)
        return total
