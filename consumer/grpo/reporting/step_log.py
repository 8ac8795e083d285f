"""The trainer's log of train steps and evaluations: two JSONL files in the run's folder.

One line of `steps.jsonl` for each train step: {"step": 12, "lineage": "…", "gids":
["math-0000000042", …], "ended_s": 1790000000.0, "metrics": {"rewards/mean": 0.4, …}}. A trainer
that restarts from a checkpoint trains later steps again, on the same groups, in a new lineage of
weights. Its line for a step therefore replaces every earlier line of that step and of all later
ones. What remains is the history of the weights that exist; no group may occur twice in it (I6).
Of the evaluations of one task and step, the last one counts.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

STEPS_FILE = "steps.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

Evaluations = dict[tuple[str, int], dict[str, float]]
"""Metrics by (task, train step)."""


def read_evaluations(folder: Path) -> Evaluations:
    """Return all evaluations of a run; the last one of a task and step counts.

    An incomplete line is skipped.
    """
    file = folder / EVALUATIONS_FILE
    found: Evaluations = {}
    for line in file.read_bytes().splitlines() if file.exists() else []:
        found |= _parse(line)
    return found


def _parse(line: bytes) -> Evaluations:
    try:
        entry = orjson.loads(line)
        return {(entry["task"], entry["step"]): entry["metrics"]}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        # a trainer was killed while it wrote this line; the restarted one evaluates again
        return {}


class StepWriter:
    """Append to `steps.jsonl` and `evaluations.jsonl` in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_step(self, step: int, lineage: str, gids: list[str], metrics: dict[str, float]) -> None:
        """Append one train step; it is on disk when the call returns."""
        entry: dict[str, Any] = {"step": step, "lineage": lineage, "gids": gids}
        entry |= {"ended_s": round(time.time(), 3), "metrics": metrics}
        append_line(self._folder / STEPS_FILE, entry)

    def add_evaluation(self, step: int, task: str, metrics: dict[str, float]) -> None:
        """Append one evaluation of a held-out task; it is on disk when the call returns."""
        append_line(
            self._folder / EVALUATIONS_FILE, {"step": step, "task": task, "metrics": metrics}
        )

    def evaluations(self) -> Evaluations:
        """Return all evaluations logged so far."""
        return read_evaluations(self._folder)


def append_line(file: Path, entry: dict[str, Any]) -> None:
    """Append one entry as a line of JSON; it is on disk when the call returns."""
    line = orjson.dumps(entry) + b"\n"
    with file.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            # a line that a killed trainer left incomplete must not corrupt the next one
            line = line if stream.read(1) == b"\n" else b"\n" + line
        stream.write(line)
        # on disk before the checkpoint of this step is
        stream.flush()
        os.fsync(stream.fileno())


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One line of the trainer's log."""

    step: int
    lineage: str
    gids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    ended_s: float | None = None
    """seconds since 1970; None in a log without them"""

    @classmethod
    def parse(cls, line: dict[str, Any]) -> TrainedStep:
        """Return the step in a decoded line; metrics that are not numbers are left out."""
        metrics = (line.get("metrics") or {}).items()
        return cls(
            step=int(line["step"]),
            lineage=str(line.get("lineage", "")),
            gids=tuple(line.get("gids") or ()),
            metrics={name: float(v) for name, v in metrics if isinstance(v, int | float)},
            ended_s=float(line["ended_s"]) if "ended_s" in line else None,
        )


class StepLog:
    """Reads the trainer's log as it grows; `steps` is the remaining history, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.replaced = 0
        self.torn = 0
        self._offset = 0

    def read_new(self) -> list[TrainedStep]:
        """Read and return the steps added since the last call.

        A line that is still being written is left for the next call.
        """
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:  # another run began in this folder
            self.steps = []
            self.replaced = self.torn = self._offset = 0
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
            # a trainer killed while it writes leaves half a line; the next one writes it again
            self.torn += 1
            return None

    def _add(self, step: TrainedStep) -> None:
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
            self.replaced += 1
        self.steps.append(step)

    def trained_twice(self) -> dict[str, list[int]]:
        """Return the steps of every group that the remaining history trains more than once."""
        trained: defaultdict[str, list[int]] = defaultdict(list)
        for step in self.steps:
            for gid in step.gids:
                trained[gid].append(step.step)
        return {gid: steps for gid, steps in trained.items() if len(steps) > 1}
