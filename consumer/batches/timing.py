"""How long pauses took, as a histogram: seconds from `pause()` to the last receipt.

pause/count p50_s p99_s        of all pauses of this trainer; percentiles are of the newest 1,000
pause/le_<seconds>             how many took at most so long, as Prometheus counts

How long a trainer has stood still for groups: what its heartbeats tell, and what the fleet is
scaled by.

How long a trainer stood still for its batches, and what they held.

take/batches groups bytes      of all batches so far; bytes as stored
take/waited_s last_waited_s    seconds that it waited for them: in all, and for the newest one
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from buffer.control.histogram import PAUSE_BOUNDS_S, Histogram
from consumer.batches.batch import Batch


class PauseTimes:
    """Pauses of one trainer; what it holds does not grow with their number."""

    def __init__(self) -> None:
        self.histogram = Histogram(PAUSE_BOUNDS_S)
        self._newest: deque[float] = deque(maxlen=1000)

    def add(self, seconds: float) -> None:
        self.histogram.add(seconds)
        self._newest.append(seconds)

    def metrics(self) -> dict[str, float]:
        """Nothing before the first pause. p50 and p99 as in `task/p50_s`: elements at n // 2 and
        int(0.99 n).
        """
        if not self._newest:
            return {}
        times = sorted(self._newest)
        named = {
            f"pause/le_{bound_s:g}": float(count)
            for bound_s, count in self.histogram.at_most().items()
        }
        percentiles = {
            "pause/p50_s": times[len(times) // 2],
            "pause/p99_s": times[int(0.99 * len(times))],
        }
        return {"pause/count": float(self.histogram.count), **percentiles, **named}


class WaitClock:
    """One thread waits; any thread may look."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """In all, the wait that goes on included."""
        ended_s = self._ended_s
        since = self._since
        return ended_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time in here as waited."""
        started = self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            self._ended_s += time.monotonic() - started


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
