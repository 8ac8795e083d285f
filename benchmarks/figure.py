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

    def seconds(self) -> float:
        prepared = self.prepare()
        start = time.perf_counter()
        result = self.run(prepared)
        taken = time.perf_counter() - start
        del result  # freed outside of the clock, for every way alike
        self.clean()
        return taken


def interleave(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, in turns (A B C A B C …).

    So a noisy moment affects all of them.

    A first round warms up and is not counted.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            seconds = way.seconds()
            if number:
                taken[name].append(seconds)
    return taken


def ratio(taken: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """Return how fast `ours` is relative to `theirs`: the median of the rounds' ratios.

    Each ratio is of two measurements that are neighbours in time.
    """
    return median(b / a for a, b in zip(taken[ours], taken[theirs], strict=True))


def per_second(taken: Mapping[str, list[float]], name: str, count: int) -> float:
    """Median of `count` things done per second."""
    return count / median(taken[name])
