"""The wait for a batch: until it is there, a deadline passes, somebody stops it, or it would be for
ever.

Why a batch is not there yet, for whoever waits: what is missing, how far that is, and who could
make it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.control.task_status import ProduceBatchStatus, batch_status
from buffer.errors import CheckpointNow, TaskStopped
from buffer.model.ids import LANES
from buffer.model.manifest import Manifest, NotReady
from buffer.run import Run
from consumer.batches.batch import Stopped
from consumer.batches.outlook import BatchOutlook

SAID = {
    ProduceBatchStatus.FINISH: "the run is finished: nothing more is made",
    ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT: "the run is paused",
    ProduceBatchStatus.EXPIRED_BATCH: "the newest weights are too old for this step: publish newer ones",
}


@dataclass(frozen=True, slots=True)
class WaitReason(NotReady):
    """`NotReady`, and what stands behind it: of each missing task, the groups that wait for a
    worker and those that one has; and the live workers, of which each could take such a group.
    """

    started: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    workers: int = 0
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL

    def __str__(self) -> str:
        # not super(): dataclasses with slots are made anew, and their methods do not know it
        parts = [NotReady.__str__(self)]
        parts += [
            f"of {task}, {wait} wait and {run} run" for task, (wait, run) in self.started.items()
        ]
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


Waiting = Callable[[WaitReason], None]
Checkpoint = Callable[[], object]

LOOK_S = 1.0
"""How long a take waits for a ring before it looks by itself."""

EXPLAIN_S = 1.0
"""Between two looks at the reason: the bell rings for every group, and each look is a round trip."""


class BatchWait:
    """How one caller waits. `check` raises what ends the wait; `producer_timeout_s` and `trains` as
    in `BatchOutlook`; the others are those of `RolloutConsumer.take_batch`.
    """

    def __init__(
        self,
        run: Run,
        check: Callable[[], None],
        *,
        deadline_s: float | None = None,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
        producer_timeout_s: float | None = None,
        trains: bool = True,
    ) -> None:
        self._run = run
        self._check = check
        self._producer_timeout_s = producer_timeout_s
        self._trains = trains
        self._deadline_s = deadline_s
        self._waiting = waiting
        self._checkpoint = checkpoint
        self._told = float("-inf")

    def until_taken(
        self,
        step: int,
        counts: Mapping[str, int],
        take: Callable[[Mapping[str, int]], Manifest | NotReady],
    ) -> Manifest:
        """Call `take` again whenever something has become ready, at least once a second: with
        `counts`, or with what there will be.
        """
        started = time.monotonic()
        wanted = counts
        outlook = BatchOutlook(self._run, step, self._producer_timeout_s, trains=self._trains)
        while not isinstance(answer := take(wanted), Manifest):
            self._check()
            left_s = (
                LOOK_S
                if self._deadline_s is None
                else self._deadline_s - (time.monotonic() - started)
            )
            if left_s <= 0:
                raise TimeoutError(
                    f"step {step} after {self._deadline_s:g} s: {explain(self._run, step, answer)}"
                )
            wanted = self._what_will_come(step, counts, answer)
            if not outlook.check(answer):
                raise Stopped
            self._tell(step, answer)
            if answer.checkpoint_now:
                self._make_room(step)
            self._run.store.wait_bell(self._run.keys.bell("trainer"), min(LOOK_S, left_s))
            self._check()
        return answer

    def _what_will_come(
        self, step: int, counts: Mapping[str, int], answer: NotReady
    ) -> dict[str, int]:
        """What to wait for: of a task that has enough (`Halt`), what is ready. Whoever waits for a
        task of which nothing is started any more would wait for ever (I11).
        """
        wanted = dict(counts)
        for task, (ready, _) in answer.missing.items():
            if ready >= counts[task]:
                continue
            halt = self._run.halts.of(task)
            stopped = self._run.limits.is_too_many_failures(task, halt.failures)
            if halt.is_enough_for(step):
                wanted[task] = ready
            if stopped or halt.kind == "broken" or not any(wanted.values()):
                many = f"{halt.failures} tries failed or were filtered one after the other"
                reason = many if stopped else halt.reason
                raise TaskStopped(
                    f"task {task} is stopped: {reason}, and the batch needs {counts[task]} groups of it "
                    f"({ready} are ready)",
                    hint=f"`rolloutmq dead` says why; mend it, then `rolloutmq continue --task {task}`",
                )
        return wanted

    def _tell(self, step: int, answer: NotReady) -> None:
        if self._waiting and time.monotonic() - self._told >= EXPLAIN_S:
            self._told = time.monotonic()
            self._waiting(explain(self._run, step, answer))

    def _make_room(self, step: int) -> None:
        if self._checkpoint is None:
            raise CheckpointNow(
                f"memory is full before step {step} can be taken, and what fills it are batches that are not committed",
                hint="write a checkpoint, commit(step, keep=…), then take again; or pass checkpoint= to take_batch",
            )
        self._checkpoint()
