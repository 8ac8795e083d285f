"""Take one snapshot of a run per second for all browsers, and none while there is no browser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from buffer.errors import RolloutMQError
from buffer.monitoring.history import History
from buffer.monitoring.json_views import describe
from buffer.monitoring.run_view import Snapshot, take_snapshot
from buffer.run import Run

EVERY_S = 1.0
EVENTS = 12
CURVE = 200
"""The number of newest points of a curve that are sent."""


class Watcher:
    """Takes snapshots at most every EVERY_S seconds, however many browsers ask."""

    def __init__(self, run: Run, history: History, is_over: Callable[[], bool]) -> None:
        self._run = run
        self._history = history
        self._is_over = is_over
        self._lock = asyncio.Lock()
        self._newest: dict[str, Any] = {}
        self._taken_at = float("-inf")

    async def snapshots(self) -> AsyncIterator[dict[str, Any]]:
        """Yield a snapshot now, and one every second, until `is_over` returns True."""
        while not self._is_over():
            yield await self.snapshot()
            await asyncio.sleep(EVERY_S)

    async def snapshot(self) -> dict[str, Any]:
        """Return the newest snapshot, taking a new one where that is older than EVERY_S.

        While the server is unreachable, `trouble` holds the error, beside the last known state.
        """
        async with self._lock:
            if time.monotonic() - self._taken_at >= 0.9 * EVERY_S:
                self._newest = await asyncio.to_thread(self._take)
                self._taken_at = time.monotonic()
            return self._newest

    def _take(self) -> dict[str, Any]:
        try:
            snap = take_snapshot(self._run, events=EVENTS)
        except RolloutMQError as error:
            return self._newest | {"trouble": error.message, "hint": error.hint}
        self._history.observe(snap)
        return {
            "trouble": "",
            "now_ms": snap.now_ms,
            "status": describe(snap),
            **self._describe_history(snap),
        }

    def _describe_history(self, snap: Snapshot) -> dict[str, Any]:
        history = self._history
        curves = {
            name: history.metric(name)[-CURVE:]
            for name in ("rewards/mean", "staleness/mean", "time/step_s")
        }
        return {
            "waits": {
                wait: {"now": now, "share": history.share(wait)}
                for wait, now in history.waits.items()
            },
            "curves": curves | {"tokens_per_s": list(history.token_rates)[-CURVE:]},
            "events": [
                {"at_ms": at_ms, "event": name, **fields} for at_ms, name, fields in snap.events
            ],
        }
