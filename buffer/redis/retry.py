"""Retries: which errors are transient, how long to pause, and how an outage is reported."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

log = logging.getLogger("rolloutmq.store")

# Not the generator of the process, which a judge or a trainer may seed: two workers with one seed
# would pause and retry in step.
SYSTEM_RANDOM = random.SystemRandom()


class NotDurable(TimeoutError):
    """A write is done, but not yet on the disk or the replicas that it must reach."""


_TRANSIENT = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    NoScriptError,  # of a user who may not load scripts: trainer or producer do it
    AskError,  # includes MOVED: not executed, and the next attempt reads the slot map again
    TryAgainError,
    ClusterDownError,
)
_TRANSIENT_PREFIXES = ("NOREPLICAS", "MISCONF", "BUSY", "UNBLOCKED", "LOADING")


def is_transient(error: Exception) -> bool:
    """Return whether a retry may succeed: the server is unreachable, starting, full or busy."""
    # these three are ConnectionErrors in redis-py, but no amount of waiting changes a password
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return False
    if isinstance(error, _TRANSIENT):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_TRANSIENT_PREFIXES)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts, which double from `first_s` up to `longest_s`.

    `jitter` is the random share of each pause: 1.0 for clients of one server, which must not retry
    in step; 0.0 for a process that waits for itself.
    """

    first_s: float
    longest_s: float
    jitter: float = 1.0

    def pause_s(self, attempt: int) -> float:
        """Return the seconds to wait after a failed attempt; attempts count from 0."""
        # bounded exponent: 2.0 ** 1024 is an OverflowError after some hours of outage
        longest_s = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30))
        return longest_s * SYSTEM_RANDOM.uniform(1.0 - self.jitter, 1.0)


class LogOnce:
    """Logs a state when it changes, not at every attempt that finds it unchanged."""

    def __init__(self, log: logging.Logger, what: str, *, ended: str = "") -> None:
        """Log reasons behind `what`, and `ended`, if given, once no reason is left."""
        self._log = log
        self._what = what
        self._ended = ended
        self._reason = ""

    def report(self, reason: str, detail: str = "") -> None:
        """Log `detail`, or else `reason`, if `reason` is new; "" means that all is well."""
        if reason == self._reason:
            return
        if reason:
            self._log.warning("%s: %s", self._what, detail or reason)
        elif self._ended:
            self._log.warning("%s", self._ended)
        self._reason = reason


class OutageLog:
    """Logs the outages of one server. Thread-safe.

    A full server answers most calls: it is back once it accepts the operation that it refused.
    """

    def __init__(self) -> None:
        self._outages: dict[str, LogOnce] = {}
        self._lock = threading.Lock()

    def failed(self, operation: str, reason: str, *, is_full: bool) -> None:
        cause = operation if is_full else ""
        with self._lock:
            outage = self._outages.setdefault(
                cause, LogOnce(log, "server unreachable or full", ended="server back")
            )
            outage.report("failed", f"{reason}, during {operation}; waiting for it")

    def worked(self, operation: str) -> None:
        if not self._outages:
            return  # no lock on the path of every call
        with self._lock:
            for cause in ("", operation):
                if outage := self._outages.pop(cause, None):
                    outage.report("")


class OutageClock:
    """Measures how long a server has answered without an outage.

    While the server is unreachable, no process can send heartbeats. A process that counted that
    time would fence the others, or take over their role, only because its own call came first.
    """

    def __init__(self) -> None:
        self._since = self._polled = time.monotonic()
        self.had_outage = False

    def poll(self) -> float:
        """Return the seconds of uninterrupted service so far. Call it after each answer."""
        now = time.monotonic()
        if now - self._polled > 3.0:  # the calls since then have waited for the server
            self._since = now
            self.had_outage = True
        self._polled = now
        return now - self._since
