"""What a strategy sees of its task in one round, and what it answers (XTuner's `ProduceContext`).

A context is a reading, so it may be old by the time it is used: strategies only say what they want, and the scripts
that start groups count again and cannot overshoot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buffer.control import ControlState
from buffer.limits import RunLimits
from buffer.progress import Leftovers, ProduceProgress, TaskProgress


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
        """Groups that were used or are ready, since the run began. Absolute: a batch that is taken meanwhile does not
        lower it, so nothing is made twice."""
        return self.progress.consumed + self.leftovers.completed

    def room(self, target: int | None) -> int:
        """About how many groups may be started under a target (None: the one that the trainer set). The scripts decide
        for themselves; this only says how many prompts to draw."""
        in_work = self.leftovers.waiting + self.progress.running
        return (self.progress.target if target is None else target) - self.available - in_work

    @property
    def shortfall(self) -> int:
        """By how many groups the batches so far were smaller than planned (negative: larger); not made up for."""
        return self.limits.mix().groups_until(self.task, self.train_step - 1) - self.progress.consumed


def contexts(limits: RunLimits, state: ControlState, progress: ProduceProgress) -> Mapping[str, ProduceContext]:
    """The context of each task that was read. KeyError for any other."""
    step = progress.next_consumer_step
    return {
        task: ProduceContext(task, limits, state, step, counts, progress.leftovers[task])
        for task, counts in progress.tasks.items()
    }


@dataclass(frozen=True, slots=True)
class ProducePlan:
    """What a strategy wants to be started.

    target: groups of the task that may have been started or used, in all; None: the one that the trainer set.
    pools: (status, least size), in order: whence groups are started again before new prompts are drawn.
    is_enough: start nothing; the next batch is what there is.
    """

    target: int | None
    pools: tuple[tuple[str, int], ...] = (("aborted", 1),)
    is_enough: bool = False
