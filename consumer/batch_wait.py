"""The wait for a batch: until it is there, a deadline passes, somebody stops it, or it would be for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from buffer.errors import CheckpointNow, TaskStopped
from buffer.manifest import Manifest, NotReady
from buffer.run import Run
from consumer.wait_reason import WaitReason, explain

Waiting = Callable[[WaitReason], None]
Checkpoint = Callable[[], object]

EXPLAIN_S = 1.0
"""Between two looks at the reason: the bell rings for every group, and each look is a round trip."""


class BatchWait:
    """How one caller waits. `check` raises what ends the wait; the others are those of `RolloutConsumer.take_batch`."""

    def __init__(
        self,
        run: Run,
        check: Callable[[], None],
        *,
        deadline_s: float | None = None,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._run, self._check = run, check
        self._deadline_s, self._waiting, self._checkpoint = deadline_s, waiting, checkpoint
        self._told = float("-inf")

    def until_taken(self, step: int, take: Callable[[], Manifest | NotReady]) -> Manifest:
        """Call `take` again whenever something has become ready, at least once a second."""
        started = time.monotonic()
        while not isinstance(answer := take(), Manifest):
            self._check()
            left_s = 1.0 if self._deadline_s is None else self._deadline_s - (time.monotonic() - started)
            if left_s <= 0:
                raise TimeoutError(f"step {step} after {self._deadline_s:g} s: {explain(self._run, step, answer)}")
            self._raise_if_stopped(answer)
            self._tell(step, answer)
            if answer.checkpoint_now:
                self._make_room(step)
            self._run.store.wait_bell(self._run.keys.bell("trainer"), min(1.0, left_s))
            self._check()
        return answer

    def _raise_if_stopped(self, answer: NotReady) -> None:
        """A batch that waits for a task of which nothing is started any more would wait for ever (I11)."""
        for task, (ready, wanted) in answer.missing.items():
            failures, stopped = self._run.jobs.failures(task) if ready < wanted else (0, False)
            if stopped:
                raise TaskStopped(
                    f"task {task} is stopped: {failures} tries failed or were filtered one after the other, and the "
                    f"batch needs {wanted} groups of it ({ready} are ready)",
                    hint=f"`rolloutmq dead` says why; mend it, then `rolloutmq continue --task {task}`",
                )

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
