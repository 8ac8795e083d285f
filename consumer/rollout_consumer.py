"""The trainer's handle on a run: take, commit, pause, publish. Usable from any trainer.

    consumer = RolloutConsumer(run)
    position = load_checkpoint() or Position()
    consumer.open(position=position)
    for step in range(position.step + 1, 101):
        batch = consumer.take_batch(step, {"math": 16})     # blocks until 16 groups are ready
        train(batch.groups)                                  # numpy columns, see buffer.model.group
        position.add(batch.manifest)
        save_checkpoint(step, position.model_dump_json())    # yours; only then:
        consumer.commit(step, keep=oldest_checkpoint_kept)
        with consumer.paused("keep"):
            consumer.publish_weights(step, path, checksum)
    consumer.close()

Between any two of these lines the process may die. `open` with the position of a checkpoint
delivers the steps after it again, byte for byte (I5, I6), and tells a server that lost data what
was trained (`open(step)` cannot).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from buffer.batches.position import Position
from buffer.batches.trainer_opening import Opening
from buffer.control.control import Mode
from buffer.control.event_log import START, Event
from buffer.control.roles import HeldRole
from buffer.model.group import RolloutGroup
from buffer.model.manifest import Manifest
from buffer.model.rollout import PolicyVersion
from buffer.run import Run
from consumer.batches.batch import Batch, Stopped, check_not_abandoned
from consumer.batches.evaluation import EvaluationRound
from consumer.batches.outlook import status_of_taken
from consumer.batches.prefetch import Prefetcher
from consumer.batches.reader import BatchReader
from consumer.batches.timing import PauseTimes, TakeTimes, WaitClock
from consumer.batches.wait import BatchWait, Checkpoint, Waiting

PauseMode = Literal["abort", "drain", "keep"]

__all__ = ["Batch", "PauseMode", "RolloutConsumer", "Stopped"]


class RolloutConsumer:
    """One trainer of a run. One thread opens and closes it; the others of its process may call the
    rest.

    `prefetch_bytes`: of payloads that are read ahead while a batch is trained; 0 switches that off.
    """

    producer_timeout_s: float | None = 120.0
    """how long a batch is awaited while no producer lives; None: for ever"""

    def __init__(self, run: Run, *, prefetch_bytes: int = 64 * 2**20) -> None:
        self._run = run
        self.lineage = secrets.token_hex(4)
        self.pauses = PauseTimes()
        self.waits = WaitClock()
        self.role = HeldRole(
            run.control,
            "trainer",
            waited_s=lambda: self.waits.seconds,
            pauses=self.pauses.histogram,
        )
        self._reader = BatchReader(run, self.nonce)
        self._takes = TakeTimes()
        self._stop = threading.Event()
        self._prefetcher = Prefetcher(run, prefetch_bytes, self.role.ended)

    @property
    def nonce(self) -> str:
        """What the scripts know this trainer by."""
        return self.role.nonce

    def open(
        self,
        step: int = 0,
        *,
        run_nonce: str = "",
        take_over: bool = False,
        position: Position | None = None,
        regenerate: bool = False,
    ) -> Opening:
        """Become the trainer, going on from a checkpoint of `step` (0: from the start); a new
        lineage begins.

        A `position` says all that: a server that lost data is told what was trained. `regenerate`:
        also one that lost everything, or has freed what comes after the checkpoint; that is then
        generated again. Raises RoleHeld when another trainer beats (unless `take_over`, which
        fences it), LostRun when the server does not hold the run, or as a new one, LedgerError when
        `step` is not between what is freed and what was taken.
        """
        opening = self._run.trainers.open(
            self.nonce,
            step=step,
            lineage=self.lineage,
            run_nonce=run_nonce,
            take_over=take_over,
            position=position,
            regenerate=regenerate,
        )
        # an outage, however long, is waited for by whatever this trainer calls
        self._run.store.patience = lambda: not (self._stop.is_set() or self.role.ended.is_set())
        # heartbeats continue while the last step is finished after `stop`: the role is held until
        # `close`
        limits = self._run.limits
        self.role.renew_in_background(lambda: limits.heartbeat_ms / 1000, self._prefetcher.end)
        return opening

    def close(self) -> None:
        """Give the role up, so that the next trainer need not wait."""
        self._prefetcher.close()
        if self.role.thread:
            self.role.close()

    def check_role(self) -> None:
        """Raises Fenced if another trainer was opened: call it before you write what that one would
        read.
        """
        self.role.renew()

    def stop(self) -> None:
        """Make a waiting `take_batch` raise Stopped. For signal handlers."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def take_batch(
        self,
        step: int,
        counts: Mapping[str, int],
        *,
        strict: bool = True,
        deadline_s: float | None = None,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Batch:
        """The groups of train step `step`, `counts` of each task; blocks until they are ready.

        A step that was taken before comes back as it was. `waiting` hears why (a `WaitReason`),
        about once a second. `checkpoint` is called when memory is full of batches that only a
        checkpoint frees: it shall write one and commit, or, where there is one of the step before,
        keep no older one; without it, CheckpointNow is raised. Raises TimeoutError, with the
        reason, after `deadline_s`; Stopped after `stop`, Fenced when another trainer was opened;
        ExpiredBatch, NoBatch, ProducerGone where waiting is useless (`consumer.batches.outlook`
        draws when); TaskStopped when nothing more is made of a task that is short; where its
        `should_continue_fn` said that it is enough, the batch has what there is. A group that
        cannot be read is quarantined, and another one awaited in its place (I11).
        """
        self._prefetcher.end()
        started = time.monotonic()
        wait = self._wait(deadline_s=deadline_s, waiting=waiting, checkpoint=checkpoint)
        with self.waits.running():
            manifest = self._take(wait, step, counts, strict)
        waited_s = time.monotonic() - started
        known = self._prefetcher.hand_out([entry.payload for entry in manifest.entries])
        manifest, groups = self._reader.read_whole(
            self._run.ledger, manifest, known, wait, strict=strict
        )
        batch = Batch(step, groups, manifest, waited_s, status_of_taken(self._run, step))
        self._takes.add(batch)
        self._prefetcher.begin(counts)
        return batch

    def _wait(self, **how: Any) -> BatchWait:
        return BatchWait(self._run, self._check, producer_timeout_s=self.producer_timeout_s, **how)

    def take_manifest(
        self,
        step: int,
        counts: Mapping[str, int],
        *,
        strict: bool = True,
        deadline_s: float | None = None,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Manifest:
        """`take_batch` without reading it: for trainers of which each rank reads its own share."""
        wait = self._wait(deadline_s=deadline_s, waiting=waiting, checkpoint=checkpoint)
        return self._take(wait, step, counts, strict)

    def _take(
        self, wait: BatchWait, step: int, counts: Mapping[str, int], strict: bool
    ) -> Manifest:
        take = partial(self._run.ledger.take, self.nonce, step, strict=strict)
        with self._run.control.telling_loss("trainer"):
            return wait.until_taken(step, counts, take)

    def put_aside(self, step: int, reasons: Mapping[str, str]) -> Manifest:
        """Quarantine groups of a taken step that cannot be used, each with why, and wait for others
        in their places; the new manifest (I11).
        """
        ledger = self._run.ledger
        reader = self._reader
        manifest = reader.put_aside(ledger, step, reasons)
        return reader.refill(ledger, manifest, self._wait()) if manifest.open_places else manifest

    def _check(self) -> None:
        check_not_abandoned()
        self.role.check()
        if self._stop.is_set():
            raise Stopped

    def _check_if_silent(self, silent: list[str]) -> None:
        if silent:
            self._check()

    def commit(self, step: int, *, keep: int) -> None:
        """The checkpoint of `step` is durable and `keep` is the oldest one kept: batches up to
        `keep` are freed.
        """
        self._run.ledger.commit(self.nonce, step, keep)

    # -- control -------------------------------------------------------------

    @contextmanager
    def paused(self, mode: PauseMode) -> Iterator[float]:
        """Pause, wait for every live worker's receipt, and continue at the end. Yields the seconds
        it took.

        Raises Stopped, and lets the run continue, after `stop` during the wait.
        """
        try:
            seconds = self.pause(mode)
        except Stopped:
            self.continue_()
            raise
        try:
            yield seconds
        finally:
            self.continue_()

    def pause(self, mode: PauseMode, *, lanes: str = "") -> float:
        """Pause the run; returns the seconds until the last receipt. Who is silent for
        `pause_timeout_s` is fenced.

        `lanes` that stay open: "eval" lets evaluations run meanwhile (not in keep mode, which
        freezes engines).
        """
        started = time.monotonic()
        self._run.control.set_mode("trainer", Mode(mode), lanes=lanes, nonce=self.nonce)
        self._run.receipts.wait(fences=True, watch=self._check_if_silent)
        seconds = time.monotonic() - started
        self.pauses.add(seconds)
        return seconds

    def continue_(self) -> None:
        """Let the run go on, as far as the operator does not hold it."""
        self._run.control.set_mode("trainer", Mode.RUN, nonce=self.nonce)

    def finish(self) -> None:
        """The run is over: workers and producer end what they have and leave."""
        self._run.control.set_mode("trainer", Mode.FINISH, nonce=self.nonce)

    def publish_weights(self, version: int, path: str, checksum: str) -> PolicyVersion:
        """Name the weights after train step `version` as the newest; workers load them before they
        claim again.
        """
        weights = PolicyVersion(self.lineage, version)
        self._run.control.publish_weights(self.nonce, weights, path, checksum)
        return weights

    # -- evaluation ----------------------------------------------------------

    def evaluate(
        self,
        task: str,
        count: int,
        *,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> list[RolloutGroup]:
        """`count` groups of an evaluation task, generated by the workers with the newest weights.

        They have a ledger of their own and touch no training counter. What an interrupted
        evaluation left is used if it is of these weights; else it is put away. `waiting` and
        `checkpoint` as in `take_batch`.
        """
        wait = self._wait(waiting=waiting, checkpoint=checkpoint, trains=False)
        return self.begin_evaluation(task, count).wait(wait)

    def begin_evaluation(self, task: str, count: int) -> EvaluationRound:
        """The same in the background: `poll` it between your steps, and end it before the next one
        of that task.
        """
        return EvaluationRound(self._run, self.nonce, self._reader, task, count)

    def finish_evaluation(
        self,
        pending: EvaluationRound,
        *,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> list[RolloutGroup]:
        """Wait for an evaluation in the background; `waiting` and `checkpoint` as in `take_batch`."""
        return pending.join(self._wait(waiting=waiting, checkpoint=checkpoint, trains=False))

    # -- what happens --------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Of this trainer so far: take/*, prefetch/*, pause/*; README of this package says what
        each is.
        """
        ahead = self._prefetcher
        prefetch = {
            "used_groups": ahead.used,
            "read_groups": ahead.read,
            "held_bytes": ahead.held_bytes,
        }
        named = {f"prefetch/{name}": float(value) for name, value in prefetch.items()}
        quarantined = {"take/quarantined_groups": float(self._reader.quarantined)}
        return self._takes.metrics() | quarantined | named | self.pauses.metrics()

    def events(
        self, after: str = START, *, limit: int = 500, block_ms: int | None = None
    ) -> list[tuple[str, Event]]:
        """(id, event) of what happened in the run behind an id, oldest first; waits up to
        `block_ms` for the next.
        """
        return self._run.events.read(after, limit=limit, block_ms=block_ms)
