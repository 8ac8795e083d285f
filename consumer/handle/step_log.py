"""The trainer's log of train steps and evaluations: two JSONL files in the run's folder.

A line of `steps.jsonl`: {"step": 12, "lineage": "…", "gids": ["math-0000000042", …], "ended_s":
1790000000.0, "host": "gpu7", "metrics": {"rewards/mean": 0.4, …}, "histograms": {"rewards":
`StepHistogram`, …}}, and `silenced` with the findings that the config silences, if it names any. A
line replaces every earlier line of its step and of later ones, as a trainer that restarts trains
steps again; no group may remain twice (I6).
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from consumer.handle.histogram import StepHistogram

STEPS_FILE = "steps.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

Histograms = Mapping[str, StepHistogram]
_NO_HISTOGRAMS: Histograms = MappingProxyType({})
Evaluations = dict[tuple[str, int], dict[str, float]]  # metrics by (task, train step)


def read_evaluations(folder: Path) -> Evaluations:
    """Return all evaluations of a run, the last of each task and step; skip incomplete lines."""
    file = folder / EVALUATIONS_FILE
    found: Evaluations = {}
    for line in file.read_bytes().splitlines() if file.exists() else []:
        # a killed trainer left half of a line; the restarted one evaluates again
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):
            entry = orjson.loads(line)
            found[entry["task"], entry["step"]] = entry["metrics"]
    return found


class StepWriter:
    """Appends to `steps.jsonl` and `evaluations.jsonl`; a line is on disk when a call returns."""

    def __init__(self, folder: Path, silenced: Sequence[str] = ()) -> None:
        self._folder = folder
        self._silenced = silenced

    def add_step(
        self,
        step: int,
        lineage: str,
        gids: list[str],
        metrics: dict[str, float],
        histograms: Histograms = _NO_HISTOGRAMS,
    ) -> None:
        entry: dict[str, Any] = {"step": step, "lineage": lineage, "gids": gids}
        entry |= {"ended_s": round(time.time(), 3), "host": socket.gethostname()}
        entry["metrics"] = metrics
        entry |= {"silenced": self._silenced} if self._silenced else {}
        entry["histograms"] = {name: each.document() for name, each in histograms.items()}
        append_line(self._folder / STEPS_FILE, entry)

    def add_evaluation(self, step: int, task: str, metrics: dict[str, float]) -> None:
        append_line(
            self._folder / EVALUATIONS_FILE, {"step": step, "task": task, "metrics": metrics}
        )


def append_line(file: Path, entry: dict[str, Any]) -> None:
    """Append one entry as a line of JSON; return once it is on disk."""
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
    step: int
    lineage: str
    gids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    ended_s: float | None = None  # since 1970; None in a log without it
    silenced: tuple[str, ...] = ()  # names of findings about learning ([trainer] silence)
    histograms: Histograms = field(default_factory=dict)
    host: str = ""  # of the trainer

    @property
    def began_s(self) -> float | None:
        if self.ended_s is None:
            return None
        return self.ended_s - self.metrics.get("time/step_s", 0.0)

    @classmethod
    def parse(cls, line: dict[str, Any]) -> TrainedStep:
        """Return the step in a decoded line; metrics that are not numbers are left out."""
        metrics = (line.get("metrics") or {}).items()
        histograms = {n: StepHistogram.parse(v) for n, v in (line.get("histograms") or {}).items()}
        return cls(
            step=int(line["step"]),
            lineage=str(line.get("lineage", "")),
            gids=tuple(line.get("gids") or ()),
            host=str(line.get("host", "")),
            metrics={name: float(v) for name, v in metrics if isinstance(v, int | float)},
            ended_s=float(line["ended_s"]) if "ended_s" in line else None,
            silenced=tuple(line.get("silenced") or ()),
            histograms={name: found for name, found in histograms.items() if found},
        )


def read_steps(folder: Path | None) -> list[TrainedStep]:
    """Return the steps that remain in a run's history; [] without a folder."""
    if folder is None:
        return []
    log = StepLog(folder / STEPS_FILE)
    log.read_new()
    return log.steps


class StepLog:
    """Reads the trainer's log as it grows; `steps` is the remaining history, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.replaced = 0
        self.torn = 0
        self._offset = 0

    def read_new(self) -> list[TrainedStep]:
        """Return the whole lines added since the last call."""
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:  # another run began in this folder
            self.steps = []
            self.replaced = self.torn = self._offset = 0
        with self.path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        added = []
        for line in filter(bytes.strip, whole.splitlines()):
            try:
                step = TrainedStep.parse(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
                # a killed trainer left half a line; the next one writes it again
                self.torn += 1
                continue
            added.append(step)
            while self.steps and self.steps[-1].step >= step.step:
                self.steps.pop()
                self.replaced += 1
            self.steps.append(step)
        return added

    def trained_twice(self) -> dict[str, list[int]]:
        """Return the steps of every group that the remaining history trains more than once."""
        trained: defaultdict[str, list[int]] = defaultdict(list)
        for step in self.steps:
            for gid in step.gids:
                trained[gid].append(step.step)
        return {gid: steps for gid, steps in trained.items() if len(steps) > 1}
