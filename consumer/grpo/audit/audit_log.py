"""`audit.jsonl` in the run's folder: who made the groups of each audited batch, chosen or not.

{"step": 17, "groups": [["math-0000000123", "w3", "3f2a:16"], …]}

A batch that is audited again after a crash is there twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from consumer.grpo.reporting.step_log import append_line

FILE = "audit.jsonl"


class MadeGroup(NamedTuple):
    """One group of a train batch: its worker, and the oldest weights of its tokens."""

    step: int
    gid: str
    worker: str
    weights: str


def add_batch(folder: Path, step: int, groups: Sequence[MadeGroup]) -> None:
    append_line(folder / FILE, {"step": step, "groups": [group[1:] for group in groups]})


def groups_of(folder: Path, worker: str) -> Iterator[MadeGroup]:
    """Yield the groups of a worker in audited batches, each once."""
    file = folder / FILE
    found = dict.fromkeys(
        group
        for line in (file.read_bytes().splitlines() if file.exists() else ())
        for group in _parse(line)
        if group.worker == worker
    )
    return iter(found)


def _parse(line: bytes) -> list[MadeGroup]:
    try:
        entry = orjson.loads(line)
        return [MadeGroup(entry["step"], *group) for group in entry["groups"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        # a killed auditor left half of this line; the next one writes the batch again
        return []
