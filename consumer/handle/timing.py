"""How long one trainer waited for batches and pauses: take/* and pause/* of consumer/README.md."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from buffer.control.histogram import PAUSE_BOUNDS_S, Histogram
from consumer.handle.batch import Batch


class PauseTimes:
    def __init__(self) -> None:
        self.histogram = Histogram(PAUSE_BOUNDS_S)
        self._newest: deque[float] = deque(maxlen=1000)

    def add(self, seconds: float) -> None:
        self.histogram.add(seconds)
        self._newest.append(seconds)

    def metrics(self) -> dict[str, float]:
        """Return histogram, p50 (element n // 2) and p99 (int(0.99 n)), if there were any."""
        if not self._newest:
            return {}
        times = sorted(self._newest)
        metrics = {
            "pause/count": float(self.histogram.count),
            "pause/p50_s": times[len(times) // 2],
            "pause/p99_s": times[int(0.99 * len(times))],
        }
        for bound_s, count in self.histogram.at_most().items():
            metrics[f"pause/le_{bound_s:g}"] = float(count)
        return metrics


class WaitClock:
    """Adds up the time that one thread waits; any thread may read it.

    Heartbeats report it, and an autoscaler sizes the fleet by it.
    """

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds waited so far, including a wait that is not over."""
        ended_s = self._ended_s
        # read once: the waiting thread may reset it at any time
        since = self._since
        return ended_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.monotonic()
        self._since = started
        try:
            yield
        finally:
            self._since = None
            self._ended_s += time.monotonic() - started


class TakeTimes:
    def __init__(self) -> None:
        self._batches = 0
        self._groups = 0
        self._bytes = 0
        self._waited_s = 0.0
        self._last_s = 0.0

    def add(self, batch: Batch) -> None:
        self._batches += 1
        self._groups += len(batch.groups)
        self._bytes += sum(entry.payload.size for entry in batch.manifest.entries)
        self._waited_s += batch.waited_s
        self._last_s = batch.waited_s

    def metrics(self) -> dict[str, float]:
        return {
            "take/batches": float(self._batches),
            "take/groups": float(self._groups),
            "take/bytes": float(self._bytes),
            "take/waited_s": self._waited_s,
            "take/last_waited_s": self._last_s,
        }
