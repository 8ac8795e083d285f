"""The trainer's own record of what it trained: `steps.jsonl` in the run's folder, one JSON line per train step.

A line is {"step": 12, "lineage": "…", "gids": ["math-0000000042", …], "metrics": {"rewards/mean": 0.4, …}}.
A trainer that restarts from a checkpoint trains later steps again, on the same groups, in a new lineage of
weights: its line for a step replaces every earlier line of that step and of all later ones. What is left is the
history of the weights that exist, and in it no group may occur twice (I6).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One line of the log."""

    step: int
    lineage: str
    gids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: dict[str, Any]) -> TrainedStep:
        metrics = {k: float(v) for k, v in (line.get("metrics") or {}).items() if isinstance(v, int | float)}
        return cls(int(line["step"]), str(line.get("lineage", "")), tuple(line.get("gids") or ()), metrics)


class StepLog:
    """Reads the log as it grows; `steps` is the surviving history, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.replaced = 0
        self.torn = 0
        self._offset = 0

    def read_new(self) -> list[TrainedStep]:
        """The lines added since the last call. A line that is still being written waits for the next call."""
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:  # another run began in this folder
            self.steps, self.replaced, self.torn, self._offset = [], 0, 0, 0
        with self.path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        added = [step for line in whole.splitlines() if (step := self._parse(line))]
        for step in added:
            self._add(step)
        return added

    def _parse(self, line: bytes) -> TrainedStep | None:
        if not line.strip():
            return None
        try:
            return TrainedStep.parse(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            # a trainer killed in the middle of a line leaves half of it; the restart writes that step again
            self.torn += 1
            return None

    def _add(self, step: TrainedStep) -> None:
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
            self.replaced += 1
        self.steps.append(step)

    def trained_twice(self) -> dict[str, list[int]]:
        """gid -> the steps that trained it, for every group with more than one in the surviving history."""
        trained: defaultdict[str, list[int]] = defaultdict(list)
        for step in self.steps:
            for gid in step.gids:
                trained[gid].append(step.step)
        return {gid: steps for gid, steps in trained.items() if len(steps) > 1}
