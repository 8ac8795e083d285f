"""A buffer that keeps groups in a list and scans all of them for every query, as most do.

The counterpart of XTuner's in-memory buffer: count by task and status, refresh by recomputing every
group's staleness, take by filtering and sorting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.bench_run import TASK
from benchmarks.figure import Figure, Way, interleave


@dataclass
class ScannedRollout:
    """What a scan looks at of one rollout."""

    task: str
    status: str
    versions: list[int]
    staleness: int = 0


class ScanBuffer:
    """`groups` of 8 rollouts, each with one policy version."""

    def __init__(self, groups: int) -> None:
        self.groups = [
            [ScannedRollout(TASK, "completed", [draw % 4]) for _ in range(8)]
            for draw in range(groups)
        ]

    def count(self, task: str, status: str) -> int:
        return sum(
            all(r.task == task and r.status == status for r in group) for group in self.groups
        )

    def refresh(self, step: int, threshold: int) -> int:
        expired = 0
        for group in self.groups:
            for rollout in group:
                rollout.staleness = step - min(rollout.versions) - 1
            if max(r.staleness for r in group) >= threshold:
                expired += 1
        return expired

    def take(self, task: str, count: int) -> list[list[ScannedRollout]]:
        ready = [
            g for g in self.groups if all(r.task == task and r.status == "completed" for r in g)
        ]
        return sorted(ready, key=lambda group: -max(r.staleness for r in group))[:count]


def scan(groups: int, rounds: int) -> Iterator[Figure]:
    """Milliseconds of each question with `groups` in the list."""
    buffer = ScanBuffer(groups)
    ways = {
        "count": Way(lambda _: buffer.count(TASK, "completed")),
        "refresh": Way(lambda _: buffer.refresh(4, 8)),
        "take 512": Way(lambda _: buffer.take(TASK, 512)),
    }
    for name, seconds in interleave(ways, rounds).wall.items():
        yield Figure("scan-based", f"{name}, {groups:,} groups", median(seconds) * 1e6, "us")
