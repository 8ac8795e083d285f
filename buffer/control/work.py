"""What the loop of a process does at the moment, for the thread that sends its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_S = 1.0
"""Work that takes less is not reported."""


class Work:
    """Written by the loop of a process, read by its heartbeat thread.

    `turns` counts the turns of the loop: while it does not change, the loop has not come round.
    """

    def __init__(self) -> None:
        self.turns = 0
        self._current: tuple[str, float] | None = None

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Note that the loop does `what` during the block."""
        self._current = (what, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def now(self) -> tuple[str, float]:
        """Return what the loop does, and for how many seconds; ("", 0) if that is short."""
        what, since_s = self._current or ("", 0.0)
        busy_s = time.monotonic() - since_s
        return (what, busy_s) if what and busy_s >= SHORT_S else ("", 0.0)
