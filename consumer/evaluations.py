"""What was measured on held-out problems, as the trainer wrote it down."""

from __future__ import annotations

from pathlib import Path

import orjson

FILE = "evaluations.jsonl"

Evaluations = dict[tuple[str, int], dict[str, float]]
"""Metrics by (task, train step)."""


def read_evaluations(folder: Path) -> Evaluations:
    """All evaluations of a run; the last one of a task and step counts. A torn last line is passed over."""
    file = folder / FILE
    lines = file.read_bytes().splitlines() if file.exists() else []
    entries = [orjson.loads(line) for line in lines if line.endswith(b"}")]
    return {(entry["task"], entry["step"]): entry["metrics"] for entry in entries}
