"""What the live views remember of a run: rates, trained steps, and who waits for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from buffer.control.worker_record import WorkerState
from consumer.handle.step_log import StepLog, TrainedStep
from rolloutmq.views.run_view import RunView

TRAINER = "trainer waits for groups"
WORKERS = "workers wait for jobs"
PRODUCER = "producer is at its limit"


class History:
    """Collects what changes between snapshots of one run, which `observe` gets oldest first."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self.folder = run_dir
        self.log = StepLog(run_dir / "steps.jsonl") if run_dir else None
        self.token_rates: deque[float] = deque(maxlen=600)
        self.waits: list[str] = []
        self.last: RunView | None = None

    def observe(self, snap: RunView) -> None:
        """Add a snapshot, and read the steps that were trained since the last one."""
        if self.log is not None:
            self.log.read_new()
        self.token_rates.append(snap.tokens_per_s)
        self.waits = who_waits(snap, self.steps)
        self.last = snap

    @property
    def steps(self) -> list[TrainedStep]:
        """The trained steps, oldest first; [] if the trainer's log is unknown."""
        return self.log.steps if self.log else []

    def metric(self, name: str) -> list[float]:
        return [step.metrics[name] for step in self.steps if name in step.metrics]


def who_waits(snap: RunView, steps: Sequence[TrainedStep]) -> list[str]:
    """Return which processes wait now, and for what."""
    if snap.mode != "run":
        return []
    idle = [w for w in snap.live_workers if w.state == WorkerState.IDLE and not w.holds]
    at_limit = bool(snap.training) and all(
        t.account.target and t.in_flight >= t.in_flight_limit for t in snap.training
    )
    done = max(steps[-1].step, snap.committed) if steps else snap.committed
    is_training = snap.taken > done
    is_short = any(task.ready < max(1, task.batch_share) for task in snap.training)
    waits = {
        TRAINER: snap.trainer.is_alive and not is_training and is_short,
        WORKERS: bool(idle) and not snap.unclaimed,
        PRODUCER: snap.producer.is_alive and at_limit,
    }
    return [wait for wait, is_so in waits.items() if is_so]
