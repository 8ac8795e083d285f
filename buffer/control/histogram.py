"""Durations counted in buckets: counts of several workers can be added up, unlike quantiles.

Workers, trainers and views share the bounds below. A list of counts with another length is ignored:
after a change of the bounds, restart all processes of a run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

JUDGE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the times that judges take."""

PAUSE_BOUNDS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)
"""Upper bounds of the times from a trainer's `pause()` to the last receipt."""


class Histogram:
    """Counts durations by upper bound, in constant size. One thread adds; others may read."""

    def __init__(
        self, bounds_s: Sequence[float], counts: Sequence[int] = (), total_s: float = 0.0
    ) -> None:
        self._bounds_s = bounds_s
        # one more bucket for what is longer than the last bound
        is_known = len(counts) == len(bounds_s) + 1
        self._counts = list(counts) if is_known else [0] * (len(bounds_s) + 1)
        self.total_s = total_s if is_known else 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.total_s += seconds

    @property
    def counts(self) -> tuple[int, ...]:
        """The durations in each bucket, not added up; the last one has no upper bound."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def at_most(self) -> dict[float, int]:
        """Return how many durations were within each bound, as Prometheus counts them."""
        return dict(zip(self._bounds_s, accumulate(self._counts), strict=False))

    def quantile_s(self, share: float) -> float:
        """Return the `share` quantile, interpolated as Prometheus does; 0 without durations."""
        counts = self.counts
        rank = share * sum(counts)
        below = 0
        lower_s = 0.0
        for upper_s, count in zip(self._bounds_s, counts, strict=False):
            if count and below + count >= rank:
                return lower_s + (upper_s - lower_s) * (rank - below) / count
            below += count
            lower_s = upper_s
        return lower_s if sum(counts) else 0.0


def join_counts(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


def parse_counts(text: str) -> tuple[int, ...] | None:
    """Return the counts in a text; None if it contains anything but whole numbers."""
    words = text.split()
    is_whole = all(word.isascii() and word.isdigit() and len(word) <= 15 for word in words)
    return tuple(map(int, words)) if is_whole else None
