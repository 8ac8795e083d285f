"""The newest train steps of a run as series of numbers, and what a finding about them is."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from consumer.handle.step_log import Evaluations, TrainedStep

STEPS = 200  # that are read: views and the trainer's log find the same
FRESH = 10  # a metric that the newest steps lack is not read
LARGEST = 1e30  # sums of squares of larger numbers overflow

Floats = NDArray[np.float64]
Level = Literal["note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about learning, with numbers; since which step, what to try, what to look at.

    `look`: metrics (`rewards/mean`), groups (`math-0000000042`) and commands.
    """

    what: str
    fix: str
    since: int
    look: tuple[str, ...] = ()
    level: Level = "warning"
    name: str = ""
    """as in `[trainer] silence`; `findings` sets it"""
    task: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """The means of the first and the last third of some steps, and how sure a change is.

    `z`: the difference in standard errors, as if the steps were independent.
    """

    early: float
    late: float
    z: float

    @property
    def by(self) -> float:
        return self.late - self.early


@dataclass(frozen=True, slots=True)
class Series:
    """One metric by train step, oldest first; steps without it are left out."""

    steps: Sequence[int]
    values: Floats

    def part(self, first: int) -> Series:
        """Return the steps from `first` on."""
        start = bisect_left(self.steps, first)
        return Series(self.steps[start:], self.values[start:])

    def mean(self, over: int) -> float:
        """Return the mean of the newest `over` values; nan without one."""
        return float(self.values[-over:].mean()) if len(self.values) else math.nan

    def since(self, test: Callable[[Floats], NDArray[np.bool_]], over: int) -> int | None:
        """Return since which step the mean of `over` values in a row passes a test.

        That is the first of them. None: the newest do not pass, or there are too few.
        """
        if len(self.values) < over:
            return None
        means = np.convolve(self.values, np.full(over, 1 / over), "valid")
        fails = np.flatnonzero(~test(means))
        first = int(fails[-1]) + 1 if len(fails) else 0
        return self.steps[first] if first < len(means) else None

    def change(self, over: int, fewest: int) -> Change | None:
        """Return how the newest `over` values have changed; None below `fewest`."""
        values = self.values[-over:]
        third = len(values) // 3
        if len(values) < fewest or third < 2:
            return None
        early, late = values[:third], values[-third:]
        error = math.sqrt((early.var(ddof=1) + late.var(ddof=1)) / third)
        by = float(late.mean() - early.mean())
        z = by / error if error > 0 else math.copysign(math.inf, by) if by else 0.0
        return Change(float(early.mean()), float(late.mean()), z)


@dataclass(frozen=True)
class Window:
    """The newest `STEPS` steps, and all evaluations."""

    steps: Sequence[TrainedStep]
    evaluations: Evaluations = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Sequence[TrainedStep], evaluations: Evaluations) -> Window:
        return cls(steps[-STEPS:], evaluations)

    def series(self, name: str) -> Series:
        rows = [
            (step.step, value)
            for step in self.steps
            if (value := _finite(step.metrics.get(name))) is not None
        ]
        if not rows or rows[-1][0] <= self.steps[-1].step - FRESH:
            return Series((), np.zeros(0))
        return Series([step for step, _ in rows], np.array([value for _, value in rows]))

    def reward(self, task: str = "") -> Series:
        """Return the mean reward of a task, else of all; a run of one task has only the latter."""
        own = self.series(f"rewards/{task}") if task else None
        return own if own and len(own.values) else self.series("rewards/mean")

    def rewards_of(self, task: str) -> str:
        """Return the name of the metric that `reward` reads."""
        own = f"rewards/{task}"
        return own if any(own in step.metrics for step in self.steps) else "rewards/mean"

    def rises(self, task: str = "", over: int = 40) -> bool | None:
        """Return whether the reward has risen, beyond chance; None: too few steps to say."""
        change = self.reward(task).change(over, fewest=12)
        return None if change is None else change.z > 2

    def tasks(self, metric: str) -> list[str]:
        """Return the tasks that have `METRIC/TASK` in the newest steps."""
        names = {name for step in self.steps[-FRESH:] for name in step.metrics}
        return sorted(name[len(metric) + 1 :] for name in names if name.startswith(f"{metric}/"))

    def groups(self, task: str, most: int = 3) -> tuple[str, ...]:
        """Return groups of a task that were trained last."""
        gids = (gid for step in reversed(self.steps[-FRESH:]) for gid in step.gids)
        return tuple([gid for gid in gids if gid.rpartition("-")[0] == task][:most])


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return max(-LARGEST, min(LARGEST, float(value))) if is_number else None
