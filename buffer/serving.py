"""In which order a claim looks at the waiting lines, and which of them it leaves to other workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buffer.chance import CHANCE
from buffer.keys import LANES
from buffer.limits import RunLimits


@dataclass(frozen=True, slots=True)
class Serves:
    """What a worker of a mixed fleet takes: some tasks, some lanes."""

    tasks: frozenset[str]
    lanes: frozenset[str] = frozenset(LANES)

    def __contains__(self, line: tuple[str, str]) -> bool:
        """Whether it takes jobs of (task, lane)."""
        return line[0] in self.tasks and line[1] in self.lanes


def serving_order(
    limits: RunLimits, serves: Serves | None = None, held: Mapping[str, int] | None = None
) -> list[tuple[str, str]]:
    """(task, lane), first to last: evaluations, then groups that were begun, then new ones.

    Among tasks, the one of which the worker has `held` least for its weight is first, so that a slow one does not fill
    the worker; where they are even, they are drawn by weight, anew for every claim.
    """
    weights, has = limits.newest_weights(), held or {}

    def turn(task: str) -> tuple[float, float]:
        if not (weight := weights[task]):
            # what still waits of it is of an earlier mix, and needed before all others
            return -1.0, 0.0
        return has.get(task, 0) / weight, -(CHANCE.random() ** (1.0 / weight))

    evals = [(task, "eval") for task in limits.eval_tasks]
    lines = evals + [(task, lane) for lane in ("resume", "fresh") for task in sorted(weights, key=turn)]
    return [line for line in lines if serves is None or line in serves]
