"""How long a worker waits for its judges, as its heartbeats report it and the metrics show it.

The heartbeat carries it, and Prometheus shows it as a latency. An rq judge's time includes the
queue: it is what a rollout waits, not what a judge computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from buffer.control.histogram import JUDGE_BOUNDS_S, Histogram
from buffer.control.observers import Observer, all_of
from buffer.errors import JudgeError


class JudgeTimes:
    """Counts the answers of one worker's judges by the time they took, failures too.

    `asked` counts answers, failures included; `failed` the failures; `seconds` is the sum of their
    times. Measured on the event loop, read by the heartbeat's thread.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self.failed = 0
        self.histogram = Histogram(JUDGE_BOUNDS_S)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time in the block as one answer, unless a pause ends it."""
        began = time.monotonic()
        try:
            with all_of(observer.judging() for observer in self._observers):
                yield
        except JudgeError:
            self.failed += 1
            self.histogram.add(time.monotonic() - began)
            raise
        self.histogram.add(time.monotonic() - began)
