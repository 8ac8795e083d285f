"""How long a trainer has stood still for groups: what its heartbeats tell, and what the fleet is scaled by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class WaitClock:
    """One thread waits; any thread may look."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """In all, the wait that goes on included."""
        ended_s, since = self._ended_s, self._since
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
