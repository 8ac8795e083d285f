"""Remember the live numbers of a run for charts over time, in constant memory."""

from __future__ import annotations

from typing import Any

from rolloutmq.views.run_view import RunView

MOST_ROWS = 1200
"""When there are more, every second one is dropped, and new ones are added half as often."""

STAGES = ("waiting", "running", "completed", "aborted", "expired", "taken")
MOST_WORKERS = 32


class LiveRecord:
    """Holds rows of numbers by name, oldest first, each with the server's time in milliseconds.

    Usage:
        record.add(snap.now_ms, numbers_of(snap, history.waits))
        table = record.since(0)
    """

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
        """The time of the newest row; 0 if there is none."""
        return self._rows[-1][0] if self._rows else 0


def numbers_of(snap: RunView, waits: dict[str, float]) -> dict[str, float]:
    """Return what charts show of a snapshot, by name."""
    numbers = {
        f"groups/{task.account.task}/{stage}": float(task.account.stages[stage])
        for task in snap.tasks
        for stage in STAGES
    }
    numbers |= {f"waits/{who}": share for who, share in waits.items()}
    numbers |= {
        f"worker_tokens_per_s/{worker.id}": worker.tokens_per_s
        for worker in snap.live_workers[:MOST_WORKERS]
    }
    return numbers | {
        "tokens_per_s": snap.tokens_per_s,
        "judging": float(snap.judging),
        "memory/held_bytes": float(snap.memory.held),
    }
