"""The newest train steps of a run as series of numbers, and what a finding about them is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.control.events import REWARD_OF_TASK
from consumer.handle.step_log import Evaluations, TrainedStep

STEPS = 200  # that are read: views and the trainer's log find the same
PATIENCE = 10  # steps for which something must last, as single batches are noise
LARGEST = 1e30  # sums of squares of larger numbers overflow

Floats = NDArray[np.float64]
Test = Callable[[Floats], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class LearningFinding:
    """What was found about learning, with numbers; since which step, what to try, what to look at.

    `name`: as in `[trainer] silence`. `look`: metrics (`rewards/mean`), groups (`math-0000000042`)
    and commands.
    """

    name: str
    what: str
    fix: str
    since: int
    look: tuple[str, ...]
    level: Literal["note", "warning", "error"] = "warning"
    task: str = ""


class Change(NamedTuple):
    """The means of the first and of the last of some steps."""

    early: float
    late: float
    z: float  # their difference in standard errors, as if the steps were independent


@dataclass(frozen=True, slots=True)
class Series:
    """One metric by train step, oldest first; steps without it are left out."""

    steps: Sequence[int]
    values: Floats

    def mean(self, over: int = PATIENCE) -> float:
        """Return the mean of the newest values; nan without one."""
        return float(self.values[-over:].mean()) if len(self.values) else math.nan

    def since(self, test: Test, over: int = PATIENCE) -> int | None:
        """Return since which step the mean of `over` values in a row passes a test.

        That is the first of them. None: the newest do not pass, or there are too few.
        """
        if len(self.values) < over:
            return None
        means = np.convolve(self.values, np.full(over, 1 / over), "valid")
        fails = np.flatnonzero(~test(means))
        first = int(fails[-1]) + 1 if len(fails) else 0
        return self.steps[first] if first < len(means) else None

    def change(self, over: int, fewest: int, part: int = 0) -> Change | None:
        """Return how the newest `over` values have changed; None below `fewest`, at least 6.

        `part`: values of each end that are compared; 0: a third.
        """
        values = self.values[-over:]
        if len(values) < fewest:
            return None
        part = part or len(values) // 3
        early, late = values[:part], values[-part:]
        error = math.sqrt((early.var(ddof=1) + late.var(ddof=1)) / part)
        by = float(late.mean() - early.mean())
        z = by / error if error > 0 else math.copysign(math.inf, by) if by else 0.0
        return Change(float(early.mean()), float(late.mean()), z)


@dataclass(frozen=True, slots=True)
class Window:
    """The newest steps, and all evaluations."""

    steps: Sequence[TrainedStep]
    evaluations: Evaluations

    def series(self, name: str, first: int = 0) -> Series:
        """Return a metric from step `first` on; none of it if the newest steps lack it."""
        rows = [
            (step.step, value)
            for step in self.steps
            if step.step >= first and (value := _finite(step.metrics.get(name))) is not None
        ]
        if not rows or rows[-1][0] <= self.steps[-1].step - PATIENCE:
            rows = []
        return Series([step for step, _ in rows], np.array([value for _, value in rows]))

    def reward_of(self, task: str) -> str:
        """Return the name of a task's mean reward: a run of one task has only that of all."""
        own = f"{REWARD_OF_TASK}{task}"
        return own if own in self.steps[-1].metrics else "rewards/mean"

    def reward(self, task: str = "") -> Series:
        return self.series(self.reward_of(task))

    def by_task(self, metric: str) -> dict[str, Series]:
        """Return `METRIC/TASK` of the newest steps, by task."""
        names = {name for step in self.steps[-PATIENCE:] for name in step.metrics}
        own = sorted(name for name in names if name.startswith(f"{metric}/"))
        return {name[len(metric) + 1 :]: self.series(name) for name in own}

    def groups(self, task: str) -> tuple[str, ...]:
        """Return three groups of a task that were trained last."""
        gids = (gid for step in reversed(self.steps[-PATIENCE:]) for gid in step.gids)
        return tuple([gid for gid in gids if gid.rpartition("-")[0] == task][:3])


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return max(-LARGEST, min(LARGEST, float(value))) if is_number else None
