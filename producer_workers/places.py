"""How many groups a worker claims: the next one as soon as a member of another is sampled.

What is judged or handed in needs no place in the engine, so groups that are only that do not hold up the next ones.
They are bounded by task: one whose judge cannot follow is claimed no more, the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from buffer.job import Job
from buffer.limits import Concurrency
from buffer.run import Run
from buffer.serving import Serves
from producer_workers.adaptive_concurrency import START, AdaptiveConcurrency
from producer_workers.engines.base import Engine
from producer_workers.engines.capabilities import TellsLoad

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
        self._run, self._engine, self._concurrency, self._serves = run, engine, concurrency, serves
        self._adaptive = AdaptiveConcurrency(START if concurrency == "auto" else concurrency)

    def limit(self) -> int:
        """Groups that are sampled at once."""
        wanted = self._run.limits.concurrency or self._concurrency
        return self._adaptive.limit if wanted == "auto" else wanted

    def vacancy(self, shares: Shares) -> Vacancy | None:
        """What to claim now, None for nothing. The last group comes early: most of it waits in the engine at first."""
        limit = self.limit()
        free = ceil(limit - sum(shares.values()))
        behind = Counter(job.task for job, share in shares.items() if not share)
        tasks = frozenset(task for task in self._serves.tasks if behind[task] <= limit)
        if free <= 0 or not tasks:
            return None
        # some are left for others
        most = min(free, max(1, limit // 4))
        return Vacancy(most, replace(self._serves, tasks=tasks), [job for job, share in shares.items() if share])

    def adapt(self, shares: Shares) -> bool:
        """Look at how full the engine is; whether there is more room now."""
        load = self._engine.load() if isinstance(self._engine, TellsLoad) else None
        before = self._adaptive.limit
        return load is not None and self._adaptive.look(load, int(sum(shares.values()))) > before
