"""How far production of a task runs ahead of the trainer (the reference's strategies).

A target is absolute and cumulative: it follows from the newest weights M, the run's limits and the
groups consumed. The script that starts groups counts consumed, ready and running ones against it,
so a crash, a second producer or a lost reply cannot overshoot. Filtered or failed groups do not
count. A change of limits by `rolloutmq set` holds from the next round on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

from buffer.control.control import ControlState
from buffer.control.progress import Leftovers, ProduceProgress, TaskProgress
from buffer.errors import ConfigError
from buffer.limits import RunLimits
from buffer.wire.staleness import last_step_for
from producer_workers.user_code.border import Border, Rules
from producer_workers.user_code.process_function import BlockingCall, call_of


@dataclass(frozen=True, slots=True)
class ProduceContext:
    """The state of a task in one round, perhaps old: the scripts that start groups count again.

    `train_step`: the one that is taken next.
    """

    task: str
    limits: RunLimits
    state: ControlState
    train_step: int
    progress: TaskProgress
    leftovers: Leftovers
    awaited: int  # groups missing from a batch that the trainer has taken

    @property
    def available(self) -> int:
        """Return how many groups were consumed or are ready, since the run began."""
        return self.progress.consumed + self.leftovers.completed

    def room(self, target: int | None, started: int = 0) -> int:
        """Return about how many groups may be started, with `started` others in this round.

        `target` None: of an evaluation, which draws each problem once.
        """
        if target is None:
            return self.progress.target - self.progress.cursor
        begun = self.leftovers.waiting + self.progress.running - self.leftovers.expiring + started
        return target - self.available - begun

    @property
    def shortfall(self) -> int:
        """Return how many groups the batches so far lack; negative if they were larger.

        It is never made up for. Groups that the trainer waits for are still to come.
        """
        planned = self.limits.mix().groups_until(self.task, self.train_step - 1)
        return planned - self.progress.consumed - self.awaited


def contexts(
    limits: RunLimits, state: ControlState, progress: ProduceProgress
) -> Mapping[str, ProduceContext]:
    step = progress.next_consumer_step
    return {
        task: ProduceContext(
            task,
            limits,
            state,
            step,
            counts,
            progress.leftovers[task],
            counts.awaited if counts.awaited_step == progress.awaits else 0,
        )
        for task, counts in progress.tasks.items()
    }


@dataclass(frozen=True, slots=True)
class ProducePlan:
    """The groups that a strategy wants to start.

    target: groups started or consumed, in all; None for the trainer's target. pools: (status, least
    size) of pools to reissue before drawing new prompts, in order. tail_step: last train step of
    the tail batch that expired groups begin, or None. is_enough: start nothing; the next batch has
    the ready groups.
    """

    target: int | None
    pools: tuple[tuple[str, int], ...] = (("aborted", 1),)
    tail_step: int | None = None
    is_enough: bool = False


class ProduceStrategy(Protocol):
    """Plans one task in every round, from nothing but the context."""

    def plan(self, context: ProduceContext) -> ProducePlan: ...


ShouldContinue = Callable[..., bool]
"""A user's function that stops production for the next train step (`should_continue_fn`).

    def at_least_half(completed, wanted, *, progress):
        return completed < wanted // 2 and progress.filtered < 10 * wanted

Called in every round. `completed`: ready groups. `wanted`: groups for all steps that the strategy
produces for now. `progress`: the task's counts since the run began (buffer/control/progress.py).
Once it returns False, the next batch is made of the ready groups.
"""


LIMIT_S = 30.0  # no group is started before the decision is made


class ContinueBorder(Border):
    def call(self, function: Any, *arguments: Any) -> Any:
        completed, wanted, progress = arguments
        return function(completed, wanted, progress=progress)

    def check(self, name: str, result: Any, *arguments: Any) -> bool:
        return bool(result)


CONTINUE = ContinueBorder(tuple[int, int, TaskProgress])


def continue_call(spec: str, function: Callable[..., Any]) -> ShouldContinue:
    """Return what calls a user's `should_continue_fn`, from a thread of the producer."""
    what = f"should_continue_fn {spec!r}"
    rules = Rules(what=what, name=spec, limit_s=LIMIT_S, limit_key="", memory_mb=4096)
    call = BlockingCall(call_of(function, f"{__name__}:CONTINUE", rules, path=spec))

    def should_continue(completed: int, wanted: int, *, progress: TaskProgress) -> bool:
        return bool(call(completed, wanted, progress))

    return should_continue


@dataclass(frozen=True, slots=True)
class SyncProduceStrategy:
    """Produces the batches that M serves, T <= M + sync_weights_interval; drops expired groups."""

    task: str
    limits: RunLimits
    should_continue: ShouldContinue | None = None

    def target(self, version: int) -> int:
        """Return the groups of the task in all batches that weights up to `version` serve."""
        last = last_step_for(version, self.limits.sync_weights_interval)
        return self.limits.mix().groups_until(self.task, min(last, self.limits.steps))

    def plan(self, context: ProduceContext) -> ProducePlan:
        target = self.target(context.state.weights.version) - context.shortfall
        # only what was interrupted too often is among the expired: others are dropped
        has_tail = self.limits.tail_tries(self.task)
        pools = (("expired", 1), ("aborted", 1)) if has_tail else (("aborted", 1),)
        rule = self.should_continue
        is_enough = rule is not None and _is_enough(rule, context, target)
        return ProducePlan(target, pools, is_enough=is_enough)


@dataclass(frozen=True, slots=True)
class AsyncProduceStrategy:
    """Produces every step that weights M may start, T <= M + `RunLimits.horizon`, and a surplus.

    The surplus is a share of one batch: 4 a batch with `over_sample_threshold` 1.0 give 4 more. A
    tail batch begins when `tail_batch_trigger_size` expired groups wait, has no surplus, takes
    expired groups first, and lasts until its groups are made, across rounds, producers and changes
    of the settings.
    """

    task: str
    limits: RunLimits
    should_continue: ShouldContinue | None = None

    def target(self, version: int) -> int:
        """Return the groups of the task that weights up to `version` may serve, and the surplus."""
        last = self._last_step(version)
        return self.limits.mix().groups_until(self.task, last) + self._surplus(last)

    def plan(self, context: ProduceContext) -> ProducePlan:
        trigger = self.limits.setting(self.task, "tail_batch_trigger_size")
        last = self._last_step(context.state.weights.version)
        surplus = self._surplus(last)
        needed = self.target(context.state.weights.version) - surplus - context.shortfall
        retries = self.limits.retries_expired(self.task)
        begins = retries and 0 < trigger <= context.leftovers.expired
        # the newest tail batch is unfinished, or is all that the weights serve
        tail_step = context.progress.tail_step
        tail = self.limits.mix().groups_until(self.task, tail_step) - context.shortfall
        continues = tail_step >= last or context.available < tail
        target = needed if begins or continues else needed + surplus
        # otherwise only what was interrupted too often is there: expired groups are dropped
        retries_expired = retries or continues or self.limits.tail_tries(self.task)
        least = 1 if continues else max(1, trigger)
        pools = ((("expired", least),) if retries_expired else ()) + (("aborted", 1),)
        rule = self.should_continue
        is_enough = rule is not None and _is_enough(rule, context, needed)
        return ProducePlan(target, pools, last if begins else None, is_enough)

    def _last_step(self, version: int) -> int:
        return min(last_step_for(version, self.limits.horizon(self.task)), self.limits.steps)

    def _surplus(self, last: int) -> int:
        # nothing comes after the last step that could use it
        if last >= self.limits.steps:
            return 0
        share = self.limits.mix().shares(last)[self.task]
        more: float = self.limits.setting(self.task, "over_sample_threshold")
        return ceil(more * share)


class EvaluationStrategy:
    """Produces the draws that the trainer asked for (`BatchLedger.set_target`)."""

    def plan(self, context: ProduceContext) -> ProducePlan:
        return ProducePlan(None, (("expired", 1), ("aborted", 1)))


def _is_enough(should_continue: ShouldContinue, context: ProduceContext, needed: int) -> bool:
    wanted = needed - context.progress.consumed
    if wanted <= 0:
        return False
    try:
        return not should_continue(context.leftovers.completed, wanted, progress=context.progress)
    except Exception as error:  # a user's function may raise anything: its task stops, with this
        raise ConfigError(f"should_continue_fn raised {type(error).__name__}: {error}") from error


def strategies_of(
    limits: RunLimits, should_continue: Mapping[str, ShouldContinue | None] | None = None
) -> dict[str, ProduceStrategy]:
    found: dict[str, ProduceStrategy] = {}
    for name, task in limits.tasks.items():
        rule = (should_continue or {}).get(name)
        if task.eval_of is not None:
            found[name] = EvaluationStrategy()
        elif task.strategy == "sync":
            found[name] = SyncProduceStrategy(name, limits, rule)
        else:
            found[name] = AsyncProduceStrategy(name, limits, rule)
    return found
