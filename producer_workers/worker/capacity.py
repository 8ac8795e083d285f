"""How many groups a worker claims: the next one as soon as a member of another is sampled.

What is judged or handed in needs no place in the engine, so groups that are only that do not hold
up the next ones. They are bounded by task: one whose judge cannot follow is claimed no more, the
others go on.

How many groups a worker has in work when nobody says (`concurrency = "auto"`): as many as keep its
engine full.

Additive increase, multiplicative decrease, as TCP finds the width of a path nobody tells it: double
while nothing queues in the engine, then one group more at a time; when requests queue, or its KV
cache runs short, so many groups fewer as queue. A group that waits in the engine could have run
elsewhere, and grows old. Less than a group may queue: a worker claims the next one when the first
member of another is sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from buffer.groups.job_queue import Serves
from buffer.model.job import Job
from buffer.model.limits import Concurrency
from buffer.run import Run
from producer_workers.engines.base import Engine, EngineLoad, TellsLoad

KV_SHORT = 0.95
"""Share of the KV cache from which an engine begins to throw requests out again."""

START = 8
"""Groups that a worker begins with."""

LOOKS = 2
"""Looks in a row that must see a queue: requests that have just come wait for a moment in every
engine.
"""


class AdaptiveConcurrency:
    """`limit` groups in work at once, from `least` to `most`."""

    def __init__(self, start: int = START, least: int = 1, most: int = 1024) -> None:
        self.limit = start
        self._least = least
        self._most = most
        self._is_searching = True
        self._queued = 0

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
        """While more than the limit is held, the last change has not had its effect yet: `look`
        waits for it.
        """
        self.limit = max(self._least, held // 2, held - max(1, too_many))
        self._is_searching = False
        self._queued = 0


Shares = Mapping[Job, float]
"""Groups in work, each with the share of its members that may still need the engine, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Room for `limit` groups of what `serves` names, beside those that are `sampled` now."""

    limit: int
    serves: Serves
    sampled: list[Job]


class Places:
    """Places for groups of one worker."""

    def __init__(self, run: Run, engine: Engine, concurrency: Concurrency, serves: Serves) -> None:
        self._run = run
        self._engine = engine
        self._concurrency = concurrency
        self._serves = serves
        self._adaptive = AdaptiveConcurrency(START if concurrency == "auto" else concurrency)

    def limit(self) -> int:
        """Groups that are sampled at once."""
        wanted = self._run.limits.concurrency or self._concurrency
        return self._adaptive.limit if wanted == "auto" else wanted

    def vacancy(self, shares: Shares) -> Vacancy | None:
        """What to claim now, None for nothing. The last group comes early: most of it waits in the
        engine at first.
        """
        limit = self.limit()
        free = ceil(limit - sum(shares.values()))
        behind = Counter(job.task for job, share in shares.items() if not share)
        tasks = frozenset(task for task in self._serves.tasks if behind[task] <= limit)
        if free <= 0 or not tasks:
            return None
        # some are left for others
        most = min(free, max(1, limit // 4))
        return Vacancy(
            most,
            replace(self._serves, tasks=tasks),
            [job for job, share in shares.items() if share],
        )

    def adapt(self, shares: Shares) -> bool:
        """Look at how full the engine is; whether there is more room now."""
        load = self._engine.load() if isinstance(self._engine, TellsLoad) else None
        before = self._adaptive.limit
        return load is not None and self._adaptive.look(load, int(sum(shares.values()))) > before
