"""How many groups a worker may hold.

It claims the next group as soon as a member of another is sampled: what is judged or submitted
needs no room in the engine, so it does not delay the next groups. Such groups are bounded by task:
a task whose judge is too slow is not claimed any more, the others are.

With `concurrency = "auto"`, the limit is what keeps the engine full. It is found by additive
increase and multiplicative decrease, as TCP finds the width of a path: double it while nothing
queues in the engine, then add one group at a time; when requests queue, or the KV cache runs short,
subtract the groups that queue. A group that waits in one engine could have run in another, and
grows old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from buffer.groups.job_queue import Serves
from buffer.job import Job
from buffer.model.limits import Concurrency, RunLimits
from producer_workers.engines.base import EngineLoad

KV_SHORT = 0.95
"""Share of the KV cache from which an engine begins to evict requests."""

START = 8
"""Groups that a worker begins with."""

QUEUED_POLLS = 2
"""Polls in a row that must find a queue: new requests wait for a moment in every engine."""


class AdaptiveConcurrency:
    """Finds the `limit` of groups at which an engine is full, from `least` to `most`."""

    def __init__(self, start: int = START, least: int = 1, most: int = 1024) -> None:
        self.limit = start
        self._least = least
        self._most = most
        self._is_searching = True
        self._queued = 0

    def observe(self, load: EngineLoad, held: int) -> int:
        """Return the new limit, given the engine's load while `held` groups are sampled."""
        too_many = held * load.waiting // max(1, load.running + load.waiting)
        self._queued = self._queued + 1 if too_many or load.kv_usage > KV_SHORT else 0
        # above the limit, the last decrease has not had its effect yet
        if self._queued >= QUEUED_POLLS and held <= self.limit:
            self._shrink(too_many or ceil(held / 8), held)
        # a limit that is not used up is not too low
        elif not self._queued and held >= self.limit:
            self.limit = min(self._most, 2 * self.limit if self._is_searching else self.limit + 1)
        return self.limit

    def _shrink(self, too_many: int, held: int) -> None:
        self.limit = max(self._least, held // 2, held - max(1, too_many))
        self._is_searching = False
        self._queued = 0


Shares = Mapping[Job, float]
"""The groups that are held, each with the share of its members that may need the engine, 0..1."""


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Room for `limit` groups of what `serves` names, beside those that are `sampled` now."""

    limit: int
    serves: Serves
    sampled: list[Job]


class Capacity:
    """The room of one worker, under the limits of its run and its own `concurrency`."""

    def __init__(self, limits: RunLimits, concurrency: Concurrency, serves: Serves) -> None:
        self._limits = limits
        self._concurrency = concurrency
        self._serves = serves
        self._adaptive = AdaptiveConcurrency(START if concurrency == "auto" else concurrency)

    def limit(self) -> int:
        """Return how many groups may be sampled at once."""
        wanted = self._limits.concurrency or self._concurrency
        return self._adaptive.limit if wanted == "auto" else wanted

    def vacancy(self, shares: Shares) -> Vacancy | None:
        """Return what to claim now, None for nothing."""
        limit = self.limit()
        # rounded up: most of the last group waits in the engine at first
        free = ceil(limit - sum(shares.values()))
        behind = Counter(job.task for job, share in shares.items() if not share)
        tasks = frozenset(task for task in self._serves.tasks if behind[task] <= limit)
        if free <= 0 or not tasks:
            return None
        # leaves some jobs for other workers
        most = min(free, max(1, limit // 4))
        sampled = [job for job, share in shares.items() if share]
        return Vacancy(most, replace(self._serves, tasks=tasks), sampled)

    def adapt(self, load: EngineLoad | None, shares: Shares) -> bool:
        """Adapt the limit to the engine's load. Return whether there is more room now."""
        if load is None:
            return False
        before = self._adaptive.limit
        return self._adaptive.observe(load, int(sum(shares.values()))) > before
