"""The trainer's log of train steps and evaluations: two JSONL files in the run's folder.

A step that is trained again after a restart is logged again; the reader
(`buffer.monitoring.history`) decides which entry counts. Of the evaluations of one task and step,
the last one counts.
"""

from __future__ import annotations

import os
import time
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
    """Append to `steps.jsonl` and `evaluations.jsonl` in `folder`.

    Usage:

        writer = StepWriter(config.run.folder)
        writer.add_step(batch.step, consumer.lineage, batch.manifest.gids, metrics)
    """

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
