"""How long somebody is missed, by a waiter that looks again and again: an outage of the server does not count.

While the server is away nobody can beat. Who then judged the others by the time that passed would give up, fence
them, or take over their role, only because its own call came through first.
"""

from __future__ import annotations

import time

AWAY_S = 3.0
"""A longer time between two looks is an outage: there is a call between them, and calls wait for the server."""


class OutageClock:
    """Seconds since it was made, or since the last outage that `look` noticed (`was_away`)."""

    def __init__(self) -> None:
        self._since = self._looked = time.monotonic()
        self.was_away = False

    def look(self) -> float:
        """Called after an answer of the server: the seconds for which it has answered without a break."""
        now = time.monotonic()
        if now - self._looked > AWAY_S:
            self._since, self.was_away = now, True
        self._looked = now
        return now - self._since
