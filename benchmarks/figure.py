"""One measured number, and what it should be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` in `unit`; with a `target`, it should be at least (`better="more"`) or at most that.

    A `detail` is for plots and programs, and stands in no table.
    """

    section: str
    name: str
    value: float
    unit: str
    target: float | None = None
    better: str = "more"
    detail: bool = False

    @property
    def met(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "more" else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Way:
    """One of several ways to do the same: `run` is timed, `prepare` and `clean` are not."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    clean: Callable[[], object] = lambda: None

    def spend(self, processor_time: Callable[[], float]) -> tuple[float, float]:
        """Run once; return the seconds on the clock, and those of the processor."""
        prepared = self.prepare()
        used, start = processor_time(), time.perf_counter()
        result = self.run(prepared)
        taken, used = time.perf_counter() - start, processor_time() - used
        del result  # freed outside of the clock, for every way alike
        self.clean()
        return taken, used


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of each way in each round: on the clock, and of the processor."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def interleave(
    ways: Mapping[str, Way], rounds: int, processor_time: Callable[[], float] = time.process_time
) -> Spent:
    """Return what each way spends in each round, in turns (A B C A B C …).

    So a noisy moment affects all of them.

    A first round warms up and is not counted.
    """
    spent = Spent({name: [] for name in ways}, {name: [] for name in ways})
    for number in range(rounds + 1):
        for name, way in ways.items():
            wall, cpu = way.spend(processor_time)
            if number:
                spent.wall[name].append(wall)
                spent.cpu[name].append(cpu)
    return spent


def ratio(taken: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """Return how fast `ours` is relative to `theirs`: the median of the rounds' ratios.

    Each ratio is of two measurements that are neighbours in time.
    """
    return median(b / a for a, b in zip(taken[ours], taken[theirs], strict=True))


def per_second(taken: Mapping[str, list[float]], name: str, count: int) -> float:
    """Median of `count` things done per second."""
    return count / median(taken[name])
