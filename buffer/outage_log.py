"""Says that a server went away, or is full, and that it is back: one line each, however many calls notice it."""

from __future__ import annotations

import logging
import threading

from redis.exceptions import OutOfMemoryError

log = logging.getLogger("rolloutmq.store")

AWAY = ""
"""Among what is wrong: nothing is answered. Anything else is the name of what a full server refuses."""


class OutageLog:
    """Of one store. One that is away is back once it answers anything; a full one answers most of what is asked, so
    only when it takes again what it had refused. Thread-safe."""

    def __init__(self) -> None:
        self._wrong: set[str] = set()
        self._lock = threading.Lock()

    def failed(self, what: str, error: Exception) -> None:
        """A call will be tried again."""
        wrong = what if isinstance(error, OutOfMemoryError) else AWAY
        with self._lock:
            if wrong not in self._wrong:
                log.warning("server away or full: %s during %s; waiting for it", error, what)
                self._wrong.add(wrong)

    def worked(self, what: str) -> None:
        """A call was answered."""
        if not self._wrong:
            return
        with self._lock:
            if over := self._wrong & {AWAY, what}:
                log.warning("server back")
                self._wrong -= over
