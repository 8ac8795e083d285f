"""Why a batch is not there yet, for whoever waits: what is missing, how far that is, and who could make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.batch_status import ProduceBatchStatus, batch_status
from buffer.keys import LANES
from buffer.manifest import NotReady
from buffer.run import Run

SAID = {
    ProduceBatchStatus.FINISH: "the run is finished: nothing more is made",
    ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT: "the run is paused",
    ProduceBatchStatus.EXPIRED_BATCH: "the newest weights are too old for this step: publish newer ones",
}


@dataclass(frozen=True, slots=True)
class WaitReason(NotReady):
    """`NotReady`, and what stands behind it: of each missing task, the groups that wait for a worker and those that one
    has; and the live workers, of which each could take such a group."""

    started: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    workers: int = 0
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL

    def __str__(self) -> str:
        # not super(): dataclasses with slots are made anew, and their methods do not know it
        parts = [NotReady.__str__(self)]
        parts += [f"of {task}, {wait} wait and {run} run" for task, (wait, run) in self.started.items()]
        parts += [f"{self.workers} live workers" if self.workers else "there is no live worker"]
        return "; ".join([*parts, *([SAID[self.status]] if self.status in SAID else [])])


def explain(run: Run, step: int, answer: NotReady) -> WaitReason:
    """Look at the run. One round trip beside the control state; nothing is changed."""
    short = [task for task, (ready, wanted) in answer.missing.items() if ready < wanted]
    state = run.control.state()
    numbers = iter(run.store.retrying("wait reason", lambda: _read(run, short)))
    workers = next(numbers)
    started = {task: (sum(next(numbers) for _ in LANES), int(next(numbers) or 0)) for task in short}
    return WaitReason(
        answer.missing,
        answer.recovering,
        answer.checkpoint_now,
        started=started,
        workers=workers,
        status=batch_status(state, step, run.limits),
    )


def _read(run: Run, tasks: list[str]) -> list[Any]:
    """Live workers; then of each task the lengths of its lanes, and its groups that run."""
    client: Any = run.store.control
    seconds, micros = client.time()
    living_ms = seconds * 1000 + micros // 1000 - run.limits.lease_ms
    with client.pipeline(transaction=False) as pipe:
        pipe.zcount(run.keys.workers, living_ms, "+inf")
        for task in tasks:
            for lane in LANES:
                pipe.xlen(run.keys.jobs(task, lane))
            pipe.hget(run.keys.progress(task), "running")
        return list(pipe.execute())
