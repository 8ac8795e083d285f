"""What the live views remember of a run: rates, trained steps, and which process waited for which.

Trained steps come from the trainer's own log, `steps.jsonl` in the run's folder, with one JSON
line for each train step: {"step": 12, "lineage": "…", "gids": ["math-0000000042", …], "ended_s":
1790000000.0, "metrics": {"rewards/mean": 0.4, …}}. A trainer that restarts from a checkpoint trains
later steps again, on the same groups, in a new lineage of weights. Its line for a step therefore
replaces every earlier line of that step and of all later ones. What remains is the history of the
weights that exist; no group may occur twice in it (I6).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from buffer.control.worker_record import WorkerState
from rolloutmq.views.run_view import Snapshot


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One line of the trainer's log."""

    step: int
    lineage: str
    gids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    ended_s: float | None = None
    """seconds since 1970; None in a log without them"""

    @classmethod
    def parse(cls, line: dict[str, Any]) -> TrainedStep:
        """Return the step in a decoded line; metrics that are not numbers are left out."""
        metrics = (line.get("metrics") or {}).items()
        return cls(
            step=int(line["step"]),
            lineage=str(line.get("lineage", "")),
            gids=tuple(line.get("gids") or ()),
            metrics={name: float(v) for name, v in metrics if isinstance(v, int | float)},
            ended_s=float(line["ended_s"]) if "ended_s" in line else None,
        )


class StepLog:
    """Reads the trainer's log as it grows; `steps` is the remaining history, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.replaced = 0
        self.torn = 0
        self._offset = 0

    def read_new(self) -> list[TrainedStep]:
        """Read and return the steps added since the last call.

        A line that is still being written is left for the next call.
        """
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:  # another run began in this folder
            self.steps = []
            self.replaced = self.torn = self._offset = 0
        with self.path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        added = [step for line in whole.splitlines() if (step := self._parse(line))]
        for step in added:
            self._add(step)
        return added

    def _parse(self, line: bytes) -> TrainedStep | None:
        if not line.strip():
            return None
        try:
            return TrainedStep.parse(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            # a trainer killed while it writes leaves half a line; the next one writes it again
            self.torn += 1
            return None

    def _add(self, step: TrainedStep) -> None:
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
            self.replaced += 1
        self.steps.append(step)

    def trained_twice(self) -> dict[str, list[int]]:
        """Return the steps of every group that the remaining history trains more than once."""
        trained: defaultdict[str, list[int]] = defaultdict(list)
        for step in self.steps:
            for gid in step.gids:
                trained[gid].append(step.step)
        return {gid: steps for gid, steps in trained.items() if len(steps) > 1}


TRAINER = "trainer waits for groups"
WORKERS = "workers wait for jobs"
PRODUCER = "producer is at its limit"
PAUSED = "paused"

_KEPT = 600


class History:
    """Collects what changes between snapshots of one run.

    Usage:
        history = History(run_dir)          # where the trainer writes `steps.jsonl`
        history.observe(take_snapshot(run)) # again and again, oldest first
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self.log = StepLog(run_dir / "steps.jsonl") if run_dir else None
        self.token_rates: deque[float] = deque(maxlen=_KEPT)
        self.waits: dict[str, float] = {}
        self._waited_ms: dict[str, float] = dict.fromkeys((TRAINER, WORKERS, PRODUCER, PAUSED), 0.0)
        self._watched_ms = 0.0
        self._last: Snapshot | None = None

    def observe(self, snap: Snapshot) -> None:
        """Add a snapshot; the time since the last one counts in the state of the last one."""
        if self.log is not None:
            self.log.read_new()
        if self._last is not None:
            elapsed_ms = max(0, snap.now_ms - self._last.now_ms)
            self._watched_ms += elapsed_ms
            for wait, part in self.waits.items():
                self._waited_ms[wait] += part * elapsed_ms
        self.token_rates.append(snap.tokens_per_s)
        self.waits = who_waits(snap, self.last_step)
        self._last = snap

    @property
    def last_step(self) -> TrainedStep | None:
        """The newest trained step; None if the trainer's log is unknown or empty."""
        return self.log.steps[-1] if self.log and self.log.steps else None

    def metric(self, name: str) -> list[float]:
        """Return a metric of all trained steps that have it, oldest first."""
        steps = self.log.steps if self.log else []
        return [step.metrics[name] for step in steps if name in step.metrics]

    def share(self, wait: str) -> float:
        """Return which fraction of the observed time a wait took, 0 to 1."""
        return self._waited_ms[wait] / self._watched_ms if self._watched_ms else 0.0


def who_waits(snap: Snapshot, trained: TrainedStep | None) -> dict[str, float]:
    """Return how much of each wait there is now: 0 to 1; for workers, the idle fraction of them."""
    running = snap.mode == "run"
    live = snap.live_workers
    idle = [worker for worker in live if worker.state == WorkerState.IDLE and not worker.holds]
    has_jobs = snap.places.get("waiting", 0) > 0
    at_limit = bool(snap.training) and all(
        t.account.target and t.started >= t.may_start for t in snap.training
    )
    return {
        TRAINER: float(running and _trainer_waits(snap, trained)),
        WORKERS: len(idle) / len(live) if running and live and not has_jobs else 0.0,
        PRODUCER: float(running and snap.producer.is_alive and at_limit),
        PAUSED: float(not running),
    }


def _trainer_waits(snap: Snapshot, trained: TrainedStep | None) -> bool:
    done = snap.committed if trained is None else max(trained.step, snap.committed)
    is_training = snap.taken > done
    short = any(task.ready < max(1, task.asked) for task in snap.training)
    return snap.trainer.is_alive and not is_training and short
