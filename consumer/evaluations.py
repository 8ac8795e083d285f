"""The metrics of held-out problems, as the trainer logged them."""

from __future__ import annotations

from pathlib import Path

import orjson

FILE = "evaluations.jsonl"

Evaluations = dict[tuple[str, int], dict[str, float]]
"""Metrics by (task, train step)."""


def read_evaluations(folder: Path) -> Evaluations:
    """Return all evaluations of a run; the last one of a task and step counts.

    An incomplete line is skipped.
    """
    file = folder / FILE
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
