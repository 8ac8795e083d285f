"""In which order a claim looks at the waiting lines, and which of them it leaves to other workers."""

from __future__ import annotations

import random
from dataclasses import dataclass

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


def serving_order(limits: RunLimits, serves: Serves | None = None) -> list[tuple[str, str]]:
    """(task, lane) by priority of the lane; within one the tasks in an order drawn anew, by weight, for every claim."""
    weights = {name: weight for name, weight in limits.newest_weights().items() if weight > 0}
    drawn = sorted(weights, key=lambda name: random.random() ** (1.0 / weights[name]), reverse=True)
    evals = [(task, "eval") for task in limits.eval_tasks]
    lines = evals + [(task, lane) for lane in ("resume", "fresh") for task in drawn]
    return [line for line in lines if serves is None or line in serves]
