"""Errors of a server that pass by themselves: what is tried again, and what is an answer.

Says that a server went away, or is full, and that it is back: one line each, however many calls
notice it.

How long somebody is missed, by a waiter that looks again and again: an outage of the server does
not count.

While the server is away nobody can beat. Who then judged the others by the time that passed would
give up, fence them, or take over their role, only because its own call came through first.

Why something is not done, said when that changes and not at every try.

Chance for pauses and turns. Not the generator of the process: a trainer or a judge may have seeded
that one, and two workers with one seed would wait and ask in step.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

_KINDS = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    AskError,  # and MOVED: not carried out, and the map of the slots is read again
    TryAgainError,
    ClusterDownError,
)
_WORDS = ("NOREPLICAS", "MISCONF", "BUSY", "UNBLOCKED", "LOADING")


def is_passing(error: Exception) -> bool:
    """Whether waiting may help: the server is away, starting, full or busy - not: it says no."""
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return False
    if isinstance(error, _KINDS):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_WORDS)


log = logging.getLogger("rolloutmq.store")

AWAY = ""
"""Among what is wrong: nothing is answered. Anything else is the name of what a full server
refuses.
"""


class OutageLog:
    """Of one store. One that is away is back once it answers anything; a full one answers most of
    what is asked, so only when it takes again what it had refused. Thread-safe.
    """

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


AWAY_S = 3.0
"""A longer time between two looks is an outage: there is a call between them, and calls wait for
the server.
"""


class OutageClock:
    """Seconds since it was made, or since the last outage that `look` noticed (`was_away`)."""

    def __init__(self) -> None:
        self._since = self._looked = time.monotonic()
        self.was_away = False

    def look(self) -> float:
        """Called after an answer of the server: the seconds for which it has answered without a
        break.
        """
        now = time.monotonic()
        if now - self._looked > AWAY_S:
            self._since = now
            self.was_away = True
        self._looked = now
        return now - self._since


class SaidOnce:
    """Says `what`, and why, to a log."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._reason = ""

    def say(self, reason: str) -> None:
        """Why it is so now; "" where it is not."""
        if reason and reason != self._reason:
            self._log.warning("%s: %s", self._what, reason)
        self._reason = reason


CHANCE = random.SystemRandom()
