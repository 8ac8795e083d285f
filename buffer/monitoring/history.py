"""The trainer's own record of what it trained: `steps.jsonl` in the run's folder, one JSON line per
train step.

A line is {"step": 12, "lineage": "…", "gids": ["math-0000000042", …], "metrics": {"rewards/mean":
0.4, …}}. A trainer that restarts from a checkpoint trains later steps again, on the same groups, in
a new lineage of weights: its line for a step replaces every earlier line of that step and of all
later ones. What is left is the history of the weights that exist, and in it no group may occur
twice (I6).

What the live view remembers between two looks at a run: rates, rewards, and who waited for whom.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from buffer.control.fleet import WorkerState
from buffer.monitoring.run_view import Snapshot


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One line of the log."""

    step: int
    lineage: str
    gids: tuple[str, ...]
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: dict[str, Any]) -> TrainedStep:
        metrics = {
            k: float(v)
            for k, v in (line.get("metrics") or {}).items()
            if isinstance(v, int | float)
        }
        return cls(
            int(line["step"]), str(line.get("lineage", "")), tuple(line.get("gids") or ()), metrics
        )


class StepLog:
    """Reads the log as it grows; `steps` is the surviving history, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[TrainedStep] = []
        self.replaced = 0
        self.torn = 0
        self._offset = 0

    def read_new(self) -> list[TrainedStep]:
        """The lines added since the last call. A line that is still being written waits for the
        next call.
        """
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:  # another run began in this folder
            self.steps, self.replaced, self.torn, self._offset = [], 0, 0, 0
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
            # a trainer killed in the middle of a line leaves half of it; the restart writes that
            # step again
            self.torn += 1
            return None

    def _add(self, step: TrainedStep) -> None:
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
            self.replaced += 1
        self.steps.append(step)

    def trained_twice(self) -> dict[str, list[int]]:
        """gid -> the steps that trained it, for every group with more than one in the surviving
        history.
        """
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
    """Feed it every snapshot, oldest first; `run_dir` is where the trainer's `steps.jsonl` lies."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self.log = StepLog(run_dir / "steps.jsonl") if run_dir else None
        self.token_rates: deque[float] = deque(maxlen=_KEPT)
        self.waits: dict[str, float] = {}
        self._waited_ms: dict[str, float] = dict.fromkeys((TRAINER, WORKERS, PRODUCER, PAUSED), 0.0)
        self._watched_ms = 0.0
        self._last: Snapshot | None = None

    def observe(self, snap: Snapshot) -> None:
        """Add one look. The time since the last look counts as the last look was."""
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
        """The newest trained step, where the trainer's log is known."""
        return self.log.steps[-1] if self.log and self.log.steps else None

    def metric(self, name: str) -> list[float]:
        """A metric of all trained steps that have it, by step."""
        steps = self.log.steps if self.log else []
        return [step.metrics[name] for step in steps if name in step.metrics]

    def share(self, wait: str) -> float:
        """Which part of the watched time a wait took, 0 to 1."""
        return self._waited_ms[wait] / self._watched_ms if self._watched_ms else 0.0


def who_waits(snap: Snapshot, trained: TrainedStep | None) -> dict[str, float]:
    """Every wait with how much of it there is now: 0 to 1 (for workers: the idle part of them)."""
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
