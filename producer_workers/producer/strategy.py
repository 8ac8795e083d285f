"""How far production of a task runs ahead of the trainer (XTuner's strategies, as numbers instead
of loops).

A target is absolute and cumulative, and follows from the newest weights M, the run's limits and
what was used. What was used, is ready or is in work counts against it, in the script that starts
groups, so a crash, a second producer or a lost reply cannot overshoot; and what is filtered or
fails for good does not count, so it is made up for. The limits are the run's own object: what
`rolloutmq set` changes holds from the next round on.

What a strategy sees of its task in one round, and what it answers (XTuner's `ProduceContext`).

A context is a reading, so it may be old by the time it is used: strategies only say what they want,
and the scripts that start groups count again and cannot overshoot.

Whether a task goes on being produced, as a function of the user's (XTuner's `should_continue_fn`).

    def at_least_half(completed, wanted, *, progress):
        return completed < wanted // 2 and progress.filtered < 10 * wanted

`completed`: groups that are ready; `wanted`: groups that should be, for all steps that the strategy
produces for at this moment; `progress`: the task's counts since the run began
(buffer/control/progress.py). Called in every round of the producer. Once it says no, nothing more
is started for the next train step, and its batch is what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from buffer.control.control import ControlState
from buffer.control.progress import Leftovers, ProduceProgress, TaskProgress
from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from buffer.model.limits import RunLimits
from buffer.model.staleness import last_step_for


@dataclass(frozen=True, slots=True)
class ProduceContext:
    """One task at one moment. `train_step` is the one that is taken next."""

    task: str
    limits: RunLimits
    state: ControlState
    train_step: int
    progress: TaskProgress
    leftovers: Leftovers

    @property
    def version(self) -> int:
        """The newest policy version."""
        return self.state.weights.version

    @property
    def available(self) -> int:
        """Groups that were used or are ready, since the run began. Absolute: a batch that is taken
        meanwhile does not lower it, so nothing is made twice.
        """
        return self.progress.consumed + self.leftovers.completed

    def room(self, target: int | None) -> int:
        """About how many groups may be started under a target (None: the one that the trainer set).
        The scripts decide for themselves; this only says how many prompts to draw.
        """
        in_work = self.leftovers.waiting + self.progress.running
        return (self.progress.target if target is None else target) - self.available - in_work

    @property
    def shortfall(self) -> int:
        """By how many groups the batches so far were smaller than planned (negative: larger); not
        made up for.
        """
        return (
            self.limits.mix().groups_until(self.task, self.train_step - 1) - self.progress.consumed
        )


def contexts(
    limits: RunLimits, state: ControlState, progress: ProduceProgress
) -> Mapping[str, ProduceContext]:
    """The context of each task that was read. KeyError for any other."""
    step = progress.next_consumer_step
    return {
        task: ProduceContext(task, limits, state, step, counts, progress.leftovers[task])
        for task, counts in progress.tasks.items()
    }


@dataclass(frozen=True, slots=True)
class ProducePlan:
    """What a strategy wants to be started.

    target: groups of the task that may have been started or used, in all; None: the one that the
    trainer set. pools: (status, least size), in order: whence groups are started again before new
    prompts are drawn. is_enough: start nothing; the next batch is what there is.
    """

    target: int | None
    pools: tuple[tuple[str, int], ...] = (("aborted", 1),)
    is_enough: bool = False


ShouldContinue = Callable[..., bool]


def load_should_continue(spec: str | None) -> ShouldContinue | None:
    """The function at "module:function"; None, for which production goes on until the target is
    reached, for None.
    """
    if spec is None:
        return None
    function = load_object(spec, kind="should_continue_fn")
    if not callable(function):
        raise ConfigError(
            f"should_continue_fn {spec!r} is not a function", hint='give "module:function"'
        )
    chosen: ShouldContinue = function
    return chosen


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
        return ProducePlan(
            target, tuple((p, 1) for p in pools), _is_enough(self.should_continue, context, target)
        )


@dataclass(frozen=True, slots=True)
class AsyncProduceStrategy:
    """Every step that weights M may still serve, T <= M + stale_threshold, and some groups beyond.

    Groups beyond are a share of one batch, not of what is missing: with 4 a batch and
    `over_sample_threshold` 1.0 there are 4 more than the target. There are none in a tail batch:
    while `tail_batch_trigger_size` expired groups wait, only what is missing is started, from these
    first.
    """

    task: str
    limits: RunLimits
    should_continue: ShouldContinue | None = None

    def target(self, version: int) -> int:
        """Groups of the task that weights up to `version` may serve, those beyond included."""
        last = self._last_step(version)
        return self.limits.mix().groups_until(self.task, last) + self._ahead(last)

    def plan(self, context: ProduceContext) -> ProducePlan:
        trigger = self.limits.of(self.task).tail_batch_trigger_size
        ahead = self._ahead(self._last_step(context.version))
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
        return ceil(
            self.limits.of(self.task).over_sample_threshold
            * self.limits.mix().shares(last)[self.task]
        )


class EvaluationStrategy:
    """As many groups as the trainer asked for (`BatchLedger.set_target`), whatever was begun first."""

    def plan(self, context: ProduceContext) -> ProducePlan:
        return ProducePlan(None, (("expired", 1), ("aborted", 1)))


def _is_enough(
    should_continue: ShouldContinue | None, context: ProduceContext, needed: int
) -> bool:
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
    return {
        task: _strategy_of(task, limits, (should_continue or {}).get(task)) for task in limits.tasks
    }


def _strategy_of(
    task: str, limits: RunLimits, should_continue: ShouldContinue | None
) -> ProduceStrategy:
    if limits.tasks[task].eval_of is not None:
        return EvaluationStrategy()
    kind = SyncProduceStrategy if limits.tasks[task].strategy == "sync" else AsyncProduceStrategy
    return kind(task, limits, should_continue)
