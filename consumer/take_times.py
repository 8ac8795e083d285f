"""How long a trainer stood still for its batches, and what they held.

take/batches groups bytes      of all batches so far; bytes as stored
take/waited_s last_waited_s    seconds that it waited for them: in all, and for the newest one
"""

from __future__ import annotations

from consumer.batch import Batch


class TakeTimes:
    """Of one trainer."""

    def __init__(self) -> None:
        self._batches = self._groups = self._bytes = 0
        self._waited_s = self._last_s = 0.0

    def add(self, batch: Batch) -> None:
        self._batches += 1
        self._groups += len(batch.groups)
        self._bytes += sum(entry.payload.size for entry in batch.manifest.entries)
        self._waited_s += batch.waited_s
        self._last_s = batch.waited_s

    def metrics(self) -> dict[str, float]:
        counts = {"batches": self._batches, "groups": self._groups, "bytes": self._bytes}
        named = {f"take/{name}": float(count) for name, count in counts.items()}
        return named | {"take/waited_s": self._waited_s, "take/last_waited_s": self._last_s}
