"""Estimate how many workers would keep the trainer busy: the number that autoscalers act on.

A trainer that waits for a fraction w of its time could use 1 / (1 - w) times its supply. Workers
that are busy for a fraction b of their time make it, so `workers * b / (1 - w)` workers are wanted.
The number of workers now does not change this estimate, so a fleet scaled by it settles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rolloutmq.views.run_view import RunView

WINDOW_S = 300.0  # half-life of an observation's weight
DEADBAND = 0.1  # a smaller difference to the published number is noise, and moves no GPUs
MOST_AT_ONCE = 4.0  # most times by which one observation may enlarge a fleet


@dataclass(frozen=True, slots=True)
class Observation:
    """`waited_s`: how long the trainer has waited in all; `busy`: busy workers at this moment."""

    at_s: float
    trainer: str
    waited_s: float
    busy: float
    live: int


class WorkersWanted:
    """Estimates the number of workers from observations; `value` does not flap."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seconds = self._waited_s = self._busy_s = 0.0
        self._last: Observation | None = None
        self.value = 0

    def observe(self, seen: Observation | None) -> int:
        """Count the time since the last observation in its state; None: the run is paused."""
        last = self._last
        self._last = seen
        if seen is not None and not (self.value and seen.live):
            # until more is known, the present fleet is right; an empty one needs a worker
            self.value = max(1, self.value, seen.live)
        elif last and seen and last.trainer == seen.trainer and last.live and seen.at_s > last.at_s:
            self._count(last, seen)
            self._settle(seen.live)
        return self.value

    def end(self) -> int:
        """End the estimate: the run is over and needs no worker; return 0."""
        self._last = None
        self.value = 0
        return 0

    def _count(self, last: Observation, seen: Observation) -> None:
        seconds = seen.at_s - last.at_s
        kept = 0.5 ** (seconds / self._window_s)
        self._seconds = self._seconds * kept + seconds
        self._waited_s = self._waited_s * kept + min(
            max(seen.waited_s - last.waited_s, 0.0), seconds
        )
        self._busy_s = self._busy_s * kept + last.busy * seconds

    def _settle(self, live: int) -> None:
        trained_s = max(self._seconds - self._waited_s, self._busy_s / (MOST_AT_ONCE * live))
        wanted = self._busy_s / trained_s if trained_s else float(live)
        if abs(wanted - self.value) > max(DEADBAND * self.value, 0.5):
            self.value = max(1, math.ceil(wanted - DEADBAND))


def observation_in(snap: RunView) -> Observation | None:
    """Return the observation in a snapshot; None while the run is paused or has no trainer."""
    if snap.mode != "run" or not snap.trainer.is_alive:
        return None
    live = snap.live_workers
    held = [worker.holds for worker in live]
    room = [worker.concurrency or max(held, default=0) for worker in live]
    busy = sum(min(1.0, has / may) for has, may in zip(held, room, strict=True) if may)
    waited_ms = int(snap.control.get("trainer_waited_ms", 0))
    seen_ms = snap.now_ms - (snap.trainer.silent_ms or 0)
    return Observation(
        seen_ms / 1000, snap.control.get("trainer", ""), waited_ms / 1000, busy, len(live)
    )
