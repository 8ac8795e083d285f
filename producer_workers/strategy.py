"""How far production of a task runs ahead of the trainer (XTuner's strategies, as numbers instead of loops).

A target is absolute and cumulative, and follows from the newest weights M, the run's limits and what was used. What was
used, is ready or is in work counts against it, in the script that starts groups, so a crash, a second producer or a
lost reply cannot overshoot; and what is filtered or fails for good does not count, so it is made up for. The limits
are the run's own object: what `rolloutmq set` changes holds from the next round on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from buffer.errors import ConfigError
from buffer.limits import RunLimits
from buffer.staleness import last_step_for
from producer_workers.produce_context import ProduceContext, ProducePlan
from producer_workers.should_continue import ShouldContinue


class ProduceStrategy(Protocol):
    """Asked in every round, about one task; the answer depends on nothing but the context."""

    def plan(self, context: ProduceContext) -> ProducePlan:
        """What to start now."""
        ...


@dataclass(frozen=True, slots=True)
class SyncProduceStrategy:
    """Exactly the batches that the newest weights are to serve: T <= M + sync_weights_interval.

    Expired groups are never retried.
    """

    task: str
    limits: RunLimits
    should_continue: ShouldContinue | None = None

    def target(self, version: int) -> int:
        """Groups of the task in all batches that weights up to `version` are to serve."""
        last = last_step_for(version, self.limits.sync_weights_interval)
        return self.limits.mix().groups_until(self.task, min(last, self.limits.steps))

    def plan(self, context: ProduceContext) -> ProducePlan:
        target = self.target(context.version) - context.shortfall
        # only what was interrupted too often is among the expired: others are dropped
        pools = ("expired", "aborted") if self.limits.tail_tries(self.task) else ("aborted",)
        return ProducePlan(target, tuple((p, 1) for p in pools), _is_enough(self.should_continue, context, target))


@dataclass(frozen=True, slots=True)
class AsyncProduceStrategy:
    """Every step that weights M may still serve, T <= M + stale_threshold, and some groups beyond.

    Groups beyond are a share of one batch, not of what is missing: with 4 a batch and `over_sample_threshold` 1.0 there
    are 4 more than the target. There are none in a tail batch: while `tail_batch_trigger_size` expired groups wait,
    only what is missing is started, from these first.
    """

    task: str
    limits: RunLimits
    should_continue: ShouldContinue | None = None

    def target(self, version: int) -> int:
        """Groups of the task that weights up to `version` may serve, those beyond included."""
        last = self._last_step(version)
        return self.limits.mix().groups_until(self.task, last) + self._ahead(last)

    def plan(self, context: ProduceContext) -> ProducePlan:
        trigger, ahead = self.limits.tail_batch(self.task), self._ahead(self._last_step(context.version))
        needed = self.target(context.version) - ahead - context.shortfall
        is_tail_batch = 0 < trigger <= context.leftovers.expired
        # with trigger -1, only what was interrupted too often is there: expired groups are dropped
        keeps = trigger >= 0 or self.limits.tail_tries(self.task)
        return ProducePlan(
            needed if is_tail_batch else needed + ahead,
            ((("expired", max(1, trigger)),) if keeps else ()) + (("aborted", 1),),
            is_enough=_is_enough(self.should_continue, context, needed),
        )

    def _last_step(self, version: int) -> int:
        return min(last_step_for(version, self.limits.horizon), self.limits.steps)

    def _ahead(self, last: int) -> int:
        if last >= self.limits.steps:
            return 0
        return ceil(self.limits.over_sampling(self.task) * self.limits.mix().shares(last)[self.task])


class EvaluationStrategy:
    """As many groups as the trainer asked for (`BatchLedger.set_target`), whatever was begun first."""

    def plan(self, context: ProduceContext) -> ProducePlan:
        return ProducePlan(None, (("expired", 1), ("aborted", 1)))


def _is_enough(should_continue: ShouldContinue | None, context: ProduceContext, needed: int) -> bool:
    wanted = needed - context.progress.consumed
    if should_continue is None or wanted <= 0:
        return False
    try:
        return not should_continue(context.leftovers.completed, wanted, progress=context.progress)
    except Exception as error:  # the user's: whatever it raises, the task is stopped with its words
        raise ConfigError(f"should_continue_fn raised {type(error).__name__}: {error}") from error


def strategies_of(
    limits: RunLimits, should_continue: Mapping[str, ShouldContinue | None] | None = None
) -> dict[str, ProduceStrategy]:
    """The strategy of each task; `should_continue` by task where one has a function of its own."""
    return {task: _strategy_of(task, limits, (should_continue or {}).get(task)) for task in limits.tasks}


def _strategy_of(task: str, limits: RunLimits, should_continue: ShouldContinue | None) -> ProduceStrategy:
    if limits.tasks[task].eval_of is not None:
        return EvaluationStrategy()
    kind = SyncProduceStrategy if limits.tasks[task].strategy == "sync" else AsyncProduceStrategy
    return kind(task, limits, should_continue)
