"""List the run folders of this machine: state, steps, last reward, size, last change."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from buffer.model.byte_size import format_size
from consumer.grpo.reporting.step_log import StepLog
from rolloutmq.console import plain
from rolloutmq.output import age, state, table
from rolloutmq.run_owner import known_folders, last_change, read_record


@dataclass(frozen=True, slots=True)
class FolderLine:
    """A run's folder; `stage` is that of its `rolloutmq run`, "" if there was none."""

    folder: Path
    run: str
    stage: str
    step: int
    steps: int
    reward: float | None
    size: int
    changed_s: float
    detail: str

    def facts(self) -> dict[str, Any]:
        """Return what programs need to know."""
        return {
            "run": self.run,
            "folder": str(self.folder),
            "stage": self.stage,
            "step": self.step,
            "steps": self.steps or None,
            "reward": self.reward,
            "bytes": self.size,
            "changed_s_ago": round(self.changed_s, 1),
            "detail": self.detail,
        }


def read_folders(root: Path) -> list[FolderLine]:
    """Return the run folders below `root`; running ones first, then those used last."""
    return [_line_of(folder) for folder in known_folders(root)]


def _line_of(folder: Path) -> FolderLine:
    record = read_record(folder)
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    newest = log.steps[-1] if log.steps else None
    return FolderLine(
        folder=folder,
        run=record.run if record else folder.name,
        stage=record.stage if record else "",
        step=newest.step if newest else 0,
        steps=record.steps if record else 0,
        reward=newest.metrics.get("rewards/mean") if newest else None,
        size=_size(folder),
        changed_s=max(0.0, time.time() - last_change(folder)),
        detail=record.detail if record else "",
    )


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder; of files that vanish meanwhile, none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def folders_table(lines: list[FolderLine]) -> Table:
    """Return a row per folder."""
    grid = table("folder", "state", "step", "reward", "size", "changed", "note",
                 right=["step", "reward", "size"])  # fmt: skip
    for line in lines:
        of = f" of {line.steps}" if line.steps else ""
        grid.add_row(
            plain(str(line.folder)),
            state(line.stage or "-"),
            f"{line.step}{of}",
            "-" if line.reward is None else f"{line.reward:.3f}",
            format_size(line.size),
            f"{age(1000 * line.changed_s)} ago",
            plain(line.detail),
        )
    return grid
