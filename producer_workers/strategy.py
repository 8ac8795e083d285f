"""How far production of a task runs ahead of the trainer (XTuner's strategies, as numbers instead of loops).

A target is absolute and cumulative, and a pure function of the newest weights M and of the run's limits. What was
used, is ready or is in work counts against it, in the script that starts groups, so a crash, a second producer or a
lost reply cannot overshoot; and what is filtered or fails for good does not count, so it is made up for. The limits
are the run's own object: what `rolloutmq set` changes holds from the next round on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from buffer.limits import RunLimits
from buffer.staleness import last_step_for


class ProduceStrategy(Protocol):
    """What the producer asks about one task; the answers depend on nothing but their arguments and the limits."""

    def target(self, version: int) -> int:
        """Groups of the task that may have been started, in all, while `version` is the newest policy version."""
        ...

    def reissue_from(self) -> list[tuple[str, int]]:
        """(pool, least size) to start again before new prompts are drawn."""
        ...


@dataclass(frozen=True, slots=True)
class SyncProduceStrategy:
    """Exactly the batches that the newest weights are to serve: T <= M + sync_weights_interval.

    Expired groups are never retried.
    """

    task: str
    limits: RunLimits

    def target(self, version: int) -> int:
        last = last_step_for(version, self.limits.sync_weights_interval)
        return self.limits.mix().groups_until(self.task, min(last, self.limits.steps))

    def reissue_from(self) -> list[tuple[str, int]]:
        return [("aborted", 1)]


@dataclass(frozen=True, slots=True)
class AsyncProduceStrategy:
    """Every step that weights M may still serve, T <= M + stale_threshold, and some groups beyond.

    Groups beyond are a share of one batch, not of what is missing: with 4 a batch and `over_sample_threshold` 1.0 there
    are 4 more than the target.
    """

    task: str
    limits: RunLimits

    def target(self, version: int) -> int:
        limits, mix = self.limits, self.limits.mix()
        last = min(last_step_for(version, limits.horizon), limits.steps)
        ahead = ceil(limits.over_sampling(self.task) * mix.shares(last)[self.task]) if last < limits.steps else 0
        return mix.groups_until(self.task, last) + ahead

    def reissue_from(self) -> list[tuple[str, int]]:
        """Expired ones first, once enough of them wait (tail batch)."""
        trigger = self.limits.tail_batch(self.task)
        expired = [("expired", max(1, trigger))] if trigger >= 0 else []
        return [*expired, ("aborted", 1)]


def strategies_of(limits: RunLimits) -> dict[str, ProduceStrategy]:
    """The strategy of each training task."""
    return {
        task: SyncProduceStrategy(task, limits) if own.strategy == "sync" else AsyncProduceStrategy(task, limits)
        for task, own in limits.tasks.items()
        if own.eval_of is None
    }
