"""Columns of a run's trained steps and evaluations for charts, from its folder: all, or new ones.

A table is {"x": [step, …], "ended_s": [...], "columns": {metric: [value or None, …]}}.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from consumer.handle.step_log import (
    EVALUATIONS_FILE,
    STEPS_FILE,
    StepLog,
    TrainedStep,
    read_evaluations,
)
from rolloutmq.run_owner import folders_below

MOST_ROWS = 2000  # per table; of more steps, the extremes of each range are sent
Table = dict[str, Any]


class Mark(NamedTuple):
    """What a reader has: steps of a history, and the size of the evaluations' file."""

    history: int = -1
    steps: int = 0
    evaluations: int = -1


class RunSeries:
    """Reads the metrics of one run as they grow; many readers share one, each with a `Mark`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = StepLog(folder / STEPS_FILE)
        self._replaced = 0
        self._history = 0
        self._evaluations: Table = {"x": [], "columns": {}}
        self._evaluations_size = 0

    def refresh(self) -> None:
        had = len(self._log.steps)
        self._log.read_new()
        if self._log.replaced != self._replaced or len(self._log.steps) < had:
            # a trainer restarted from a checkpoint: readers start again
            self._replaced = self._log.replaced
            self._history += 1
        file = self._folder / EVALUATIONS_FILE
        size = file.stat().st_size if file.is_file() else 0
        if size != self._evaluations_size:
            self._evaluations_size = size
            found = read_evaluations(self._folder)
            steps = sorted({step for _, step in found})
            place = {step: row for row, step in enumerate(steps)}
            columns: dict[str, list[float | None]] = {}
            for (task, step), metrics in found.items():
                for name, value in metrics.items():
                    column = columns.setdefault(f"{name}/{task}", [None] * len(steps))
                    column[place[step]] = value
            self._evaluations = {"x": steps, "columns": columns}

    def since(self, mark: Mark) -> tuple[dict[str, Any], Mark]:
        """Return what was added since `mark`, and the new mark; `whole`: replace earlier steps."""
        added: dict[str, Any] = {}
        steps = self._log.steps
        is_whole = mark.history != self._history
        if is_whole or len(steps) > mark.steps:
            rows = steps if is_whole else steps[mark.steps :]
            added = {"whole": is_whole, **self._described(rows)}
        if self._evaluations_size != mark.evaluations:
            added["evaluations"] = self._evaluations
        return added, Mark(self._history, len(steps), self._evaluations_size)

    def window(self, first: int, last: int) -> dict[str, Any]:
        """Return the steps from `first` to `last`: fewer steps, so closer to one row for each."""
        rows = [step for step in self._log.steps if first <= step.step <= last]
        return self._described(rows)

    @staticmethod
    def _described(rows: Sequence[TrainedStep]) -> dict[str, Any]:
        table = step_table(rows)
        # a column of pixels has room for one step
        seen = rows[:: -(-len(rows) // 400) or 1]
        names = dict.fromkeys(name for step in seen for name in step.histograms)
        histograms = {
            name: [found and found.document() for found in (s.histograms.get(name) for s in seen)]
            for name in names
        }
        return {
            "thinned": len(rows) > MOST_ROWS,
            "steps": thinned(table, MOST_ROWS),
            "histograms": {"x": [step.step for step in seen], "columns": histograms},
        }


def step_table(steps: Sequence[TrainedStep]) -> Table:
    """Return steps as columns; a metric that a step lacks is None there."""
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    return {
        "x": [step.step for step in steps],
        "ended_s": [step.ended_s for step in steps],
        "columns": {name: [step.metrics.get(name) for step in steps] for name in names},
    }


def thinned(table: Table, most: int) -> Table:
    """Return at most `most` rows, with the extremes of each range in their order."""
    rows = len(table["x"])
    if rows <= most:
        return table
    width = -(-rows // max(1, most // 2))
    ranges = [slice(first, min(first + width, rows)) for first in range(0, rows, width)]
    # the steps that stand for a range are its first and middle one
    middles = [(each.start, (each.start + each.stop) // 2) for each in ranges]
    kept = [row for pair in middles for row in dict.fromkeys(pair)]
    return {
        "x": [table["x"][row] for row in kept],
        "ended_s": [table["ended_s"][row] for row in kept],
        "columns": {
            name: [value for each in ranges for value in _extremes(column[each])]
            for name, column in table["columns"].items()
        },
    }


def _extremes(values: Sequence[float | None]) -> Sequence[float | None]:
    """Return the lowest and the highest value in their order, or the value of a single row."""
    if len(values) == 1:
        return values
    known = [(value, row) for row, value in enumerate(values) if value is not None]
    if not known:
        return [None, None]
    ends = sorted((min(known), max(known)), key=lambda pair: pair[1])
    return [value for value, _ in ends]


def run_folders(run_dir: Path | None) -> dict[str, Path]:
    if run_dir is None:
        return {}
    beside = folders_below(run_dir.resolve().parent)
    logged = {path.name: path for path in beside if (path / STEPS_FILE).exists()}
    return {run_dir.resolve().name: run_dir, **logged}
