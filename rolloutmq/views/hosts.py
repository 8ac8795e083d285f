"""The hosts of a run: which of its processes are there, and what each host has left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from buffer.control.worker_record import HOST_NUMBERS, WorkerRecord
from consumer.handle.step_log import TrainedStep

SYSTEM = "system/"
"""Prefix of the metrics of a step that are about the trainer's host."""


def hosts(workers: Iterable[WorkerRecord], steps: Sequence[TrainedStep]) -> list[dict[str, Any]]:
    """Return one entry for each host, by name: its processes, and its newest numbers.

    The trainer's are of the end of its newest step.
    """
    found: dict[str, dict[str, Any]] = {}
    if steps and steps[-1].host:
        metrics = steps[-1].metrics
        own = {name: metrics[SYSTEM + name] for name in HOST_NUMBERS if SYSTEM + name in metrics}
        found[steps[-1].host] = {"processes": ["trainer"], **own}
    for worker in sorted(workers, key=lambda worker: -worker.silent_ms):  # the newest comes last
        host = found.setdefault(worker.facts.get("host", "?"), {"processes": []})
        host["processes"].append(worker.id)
        own = {name: getattr(worker, name) for name in HOST_NUMBERS}
        host |= {name: number for name, number in own.items() if number is not None}
    return [{"host": name, **found[name]} for name in sorted(found)]
