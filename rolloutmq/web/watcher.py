"""Take snapshots of a run for all browsers: each second while one watches, else rarely."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from buffer.control.worker_record import NUMBERS
from buffer.errors import RolloutMQError
from buffer.run.run import Run
from consumer.handle.step_log import TrainedStep
from rolloutmq.views.explain.diagnosis import diagnose, inspect
from rolloutmq.views.explain.processes import with_processes
from rolloutmq.views.explain.symptom import Symptom
from rolloutmq.views.history import History
from rolloutmq.views.number_rows import notes_of
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import RunView, read_run_view

EVERY_S = 1.0
QUIET_S = 5.0  # between snapshots while no browser watches: charts over time have no gaps then


class Watcher:
    """Takes snapshots at most every EVERY_S seconds, however many browsers ask."""

    def __init__(self, run: Run, history: History, is_over: Callable[[], bool]) -> None:
        self.live = LiveRecord()
        self._run = run
        self._history = history
        self._is_over = is_over
        self._lock = asyncio.Lock()
        self._newest: dict[str, Any] = {}
        self._taken_at = float("-inf")
        self._inspected: list[Symptom] = []
        self._inspected_at = float("-inf")

    @property
    def steps(self) -> list[TrainedStep]:
        """The trained steps as of the newest snapshot."""
        return self._history.steps

    async def snapshots(self) -> AsyncIterator[dict[str, Any]]:
        """Yield a snapshot now, and one every second, until `is_over` returns True."""
        while not self._is_over():
            yield await self.snapshot()
            await asyncio.sleep(EVERY_S)

    async def keep_record(self) -> None:
        """Take snapshots for the live record while no browser asks for any, until cancelled."""
        while True:
            await self.snapshot(QUIET_S)
            await asyncio.sleep(QUIET_S)

    async def snapshot(self, every_s: float = EVERY_S) -> dict[str, Any]:
        """Return the newest snapshot, or a new one if that is older than `every_s`.

        While the server is unreachable, `trouble` holds the error, beside the last known state.
        """
        async with self._lock:
            if time.monotonic() - self._taken_at >= 0.9 * every_s:
                self._newest = await asyncio.to_thread(self._take)
                self._taken_at = time.monotonic()
            return self._newest

    def _take(self) -> dict[str, Any]:
        try:
            snap = read_run_view(self._run, events=200)
            if time.monotonic() - self._inspected_at >= 10.0:
                steps, folder = self._history.steps, self._history.folder
                self._inspected = inspect(self._run, snap, steps, folder)
                self._inspected_at = time.monotonic()
            found = [*diagnose(snap), *self._inspected]
            findings = with_processes(snap, found, self._history.folder)
        except RolloutMQError as error:
            return self._newest | {"trouble": error.message, "hint": error.hint}
        self._history.observe(snap)
        self.live.add(snap.now_ms, numbers_of(snap))
        return {
            "trouble": "",
            "now_ms": snap.now_ms,
            "status": describe(snap),
            "control": _control(snap),
            "notes": {
                "run": [note._asdict() for note in notes_of(snap)],
                "tasks": {
                    task.account.task: [note._asdict() for note in notes_of(task)]
                    for task in snap.tasks
                },
            },
            "worker_numbers": {name: row._asdict() for name, row in NUMBERS.items()},
            "findings": [asdict(finding) for finding in findings],
            "events": [
                {"at_ms": at_ms, "event": name, **fields} for at_ms, name, fields in snap.events
            ],
        }


def _control(snap: RunView) -> dict[str, Any]:
    """Return who wants what of the run, and what an operator may decide now."""
    return {
        "operator_mode": snap.control.get("operator_mode", "run"),
        "trainer_mode": snap.control.get("trainer_mode", "run"),
        "is_orphaned": snap.is_orphaned,
        "live_workers": [worker.id for worker in snap.live_workers],
        "last_step": snap.last_step,
        "producer_name": snap.producer.name,
        "stopped_tasks": {
            task.account.task: task.stop_reason for task in snap.tasks if task.stop_reason
        },
    }


MOST_ROWS = 1200  # above this, every second row is dropped, and rows are added half as often
STAGES = ("waiting", "running", "completed", "aborted", "expired", "taken")


class LiveRecord:
    """Holds rows of numbers by name, oldest first, each with the server's time in milliseconds."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._every_ms = 0

    def add(self, at_ms: int, numbers: dict[str, float]) -> None:
        """Add a row, unless the newest one is too recent."""
        if self._rows and at_ms - self._rows[-1][0] < max(self._every_ms, 1):
            return
        self._rows.append((at_ms, numbers))
        if len(self._rows) > MOST_ROWS:
            spanned_ms = self._rows[-1][0] - self._rows[0][0]
            self._rows = self._rows[::2]
            self._every_ms = 2 * spanned_ms // MOST_ROWS

    def since(self, at_ms: int) -> dict[str, Any]:
        """Return the rows after a time: {"x": [seconds, …], "columns": {name: [value, …]}}."""
        rows = [row for row in self._rows if row[0] > at_ms]
        names = dict.fromkeys(name for _, numbers in rows for name in numbers)
        return {
            "x": [at / 1000 for at, _ in rows],
            "columns": {name: [numbers.get(name) for _, numbers in rows] for name in names},
        }

    @property
    def newest_ms(self) -> int:
        """The time of the newest row; 0 without rows."""
        return self._rows[-1][0] if self._rows else 0


def numbers_of(snap: RunView) -> dict[str, float]:
    numbers = {
        f"groups/{task.account.task}/{stage}": float(task.account.stages[stage])
        for task in snap.tasks
        for stage in STAGES
    }
    numbers |= {
        f"worker_tokens_per_s/{worker.id}": worker.tokens_per_s for worker in snap.live_workers[:32]
    }
    return numbers | {"tokens_per_s": snap.tokens_per_s}
