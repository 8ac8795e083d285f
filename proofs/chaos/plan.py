"""What every process of a chaos run agrees on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import orjson

from buffer.limits import RunLimits, TaskLimits
from buffer.wire.rollout import RolloutState
from proofs.truth.witness import score_of

RUN = "chaos"
INLINE = "sums"
BY_RQ = "judged"
"""Two tasks: one whose judge runs in the worker, and one whose judge is an rq job."""

ROWS = 97
SAMPLES = 2
BATCH = 32
SYNC_INTERVAL = 4
CHECKPOINT_EVERY = 5
KEEP_CHECKPOINTS = 2
LEASE_MS = 4000

FENCED = 5
LOST = 7
REFUSED = 9
"""Exit codes of a client: another process holds its role now; the server is not the one that it
knew; any other error of the project.
"""

SERVER = "server"
"""Name of the folder of the server; also of the target of its faults."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where things of a chaos run are."""

    root: Path

    @property
    def history(self) -> Path:
        return self.root / "history"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def dataset(self) -> Path:
        return self.root / "problems.jsonl"

    @property
    def finish(self) -> Path:
        """Once this file is there, the trainer ends the run."""
        return self.root / "finish"

    def make(self) -> None:
        for folder in (self.history, self.logs, self.checkpoints, self.weights):
            folder.mkdir(parents=True, exist_ok=True)
        rows = [{"question": question(n), "answer": str(n)} for n in range(ROWS)]
        self.dataset.write_bytes(b"\n".join(map(orjson.dumps, rows)))


def limits(wait_replicas: int = 0) -> RunLimits:
    """Two tasks, 7 to 1; short leases, so that a run of minutes has many of them."""
    return RunLimits(
        lease_ms=LEASE_MS,
        heartbeat_ms=LEASE_MS // 8,
        worker_timeout_ms=3 * LEASE_MS,
        role_timeout_ms=LEASE_MS,
        max_tries=50,
        steps=1_000_000,
        batch_size=BATCH,
        sync_weights_interval=SYNC_INTERVAL,
        stale_threshold=2 * SYNC_INTERVAL,
        on_straggler="retry",
        over_sample_threshold=1.0,
        wait_replicas=wait_replicas,
        tasks={INLINE: TaskLimits(weight=7.0), BY_RQ: TaskLimits(weight=1.0)},
    )


def judge_spec() -> str:
    return f"{__name__}:by_chance"


def by_chance(*, response: str, ground_truth: object, state: RolloutState) -> float:
    """A number that depends on the tokens alone."""
    return score_of(state.response_ids)


def question(row: int) -> str:
    return f"What is {row} + {row}?"


def mutation() -> str:
    """Which line of a script is gone, for a build that the checker must reject; "" in a real run."""
    return os.environ.get("CHAOS_MUTATION", "")
