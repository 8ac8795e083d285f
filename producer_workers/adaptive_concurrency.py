"""How many groups a worker has in work when nobody says (`concurrency = "auto"`): as many as keep its engine full.

Additive increase, multiplicative decrease, as TCP finds the width of a path nobody tells it: double while nothing
queues in the engine, then one group more at a time; when requests queue, or its KV cache runs short, so many groups
fewer as queue. A group that waits in the engine could have run elsewhere, and grows old. Less than a group may queue:
a worker claims the next one when the first member of another is sampled.
"""

from __future__ import annotations

from math import ceil

from producer_workers.engines.capabilities import EngineLoad

KV_SHORT = 0.95
"""Share of the KV cache from which an engine begins to throw requests out again."""

START = 8
"""Groups that a worker begins with."""

LOOKS = 2
"""Looks in a row that must see a queue: requests that have just come wait for a moment in every engine."""


class AdaptiveConcurrency:
    """`limit` groups in work at once, from `least` to `most`."""

    def __init__(self, start: int = START, least: int = 1, most: int = 1024) -> None:
        self.limit, self._least, self._most = start, least, most
        self._is_searching, self._queued = True, 0

    def look(self, load: EngineLoad, held: int) -> int:
        """The new limit, after a look at the engine of a worker that has `held` groups to sample."""
        too_many = held * load.waiting // max(1, load.running + load.waiting)
        self._queued = self._queued + 1 if too_many or load.kv_usage > KV_SHORT else 0
        if self._queued >= LOOKS and held <= self.limit:
            self._shrink(too_many or ceil(held / 8), held)
        elif not self._queued and held >= self.limit:
            # only what is used up is too little
            self.limit = min(self._most, 2 * self.limit if self._is_searching else self.limit + 1)
        return self.limit

    def _shrink(self, too_many: int, held: int) -> None:
        """While more than the limit is held, the last change has not had its effect yet: `look` waits for it."""
        self.limit = max(self._least, held // 2, held - max(1, too_many))
        self._is_searching, self._queued = False, 0
