"""What was measured on held-out problems, as the trainer wrote it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

FILE = "evaluations.jsonl"

Evaluations = dict[tuple[str, int], dict[str, float]]
"""Metrics by (task, train step)."""


def read_evaluations(folder: Path) -> Evaluations:
    """All evaluations of a run; the last one of a task and step counts. A torn line is passed over."""
    file = folder / FILE
    lines = file.read_bytes().splitlines() if file.exists() else []
    entries = [entry for line in lines if (entry := _parse(line))]
    return {(entry["task"], entry["step"]): entry["metrics"] for entry in entries}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        # a trainer was killed in the middle of this line; the restarted one evaluates again
        return None
    return entry
