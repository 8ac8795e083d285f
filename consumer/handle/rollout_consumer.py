"""The trainer's handle on a run: take, commit, pause, publish. Usable from any trainer.

    consumer = RolloutConsumer(run)
    position = load_checkpoint() or Position()
    consumer.open(position=position)
    for step in range(position.step + 1, 101):
        batch = consumer.take_batch(step, {"math": 16})     # blocks until 16 groups are ready
        train(batch.groups)                                  # numpy columns: RolloutGroup
        position.add(batch.manifest)
        save_checkpoint(step, position.model_dump_json())    # yours; only then:
        consumer.commit(step, keep=oldest_checkpoint_kept)
        with consumer.paused("keep"):
            consumer.publish_weights(step, path, checksum)
    consumer.close()

The process may die between any two lines: `open` with a checkpoint's position delivers the later
steps again, byte for byte (I5, I6). `take_batch`, `commit` and announcements of weights raise
GroupChanged where a group differs from what the server sent: then use neither weights nor step.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from buffer.control.control import ControlState, Mode, Work
from buffer.control.events import START, Event
from buffer.control.roles import HeldRole
from buffer.control.worker_record import PAUSE_BOUNDS_S, Histogram
from buffer.errors import ConfigError, ModelError, WireError
from buffer.ledger.ended_draws import note_draws
from buffer.ledger.position import Position
from buffer.ledger.trainer_opening import Opening
from buffer.run.run import Run
from buffer.weights.transport import PublishedWeights
from buffer.weights.transports import WeightsReceiver, is_url
from buffer.wire.rollout import PolicyVersion
from consumer.handle.batch import Batch, Stopped, check_not_abandoned
from consumer.handle.evaluation_round import Evaluated, EvaluationRound
from consumer.handle.reader import BatchReader, Prefetcher
from consumer.handle.taker import BatchTaker, Checkpoint, WaitClock, Waiting, WaitOptions
from consumer.handle.wait_rules import status_of_taken

PauseMode = Literal["abort", "drain", "keep"]

PREFETCH_BYTES = 64 * 2**20  # payloads that are read ahead

__all__ = ["Batch", "PauseMode", "RolloutConsumer", "Stopped"]


class RolloutConsumer:
    """Represents the trainer of a run.

    One thread opens and closes it; every thread may call the other methods. `prefetch_bytes`:
    payloads to read ahead while a batch is trained; 0: none. `nonce`: of a trainer that is already
    open; otherwise call `open`. `reader`: reads a batch's groups; default: all of them.
    """

    # wait this long while no producer is alive; None: forever
    producer_timeout_s: float | None = 120.0

    def __init__(
        self,
        run: Run,
        *,
        prefetch_bytes: int = PREFETCH_BYTES,
        nonce: str | None = None,
        reader: BatchReader | None = None,
    ) -> None:
        self._run = run
        self._reader = reader or BatchReader(run)
        self.lineage = secrets.token_hex(4)
        self.pauses = Histogram(PAUSE_BOUNDS_S)
        self.waits = WaitClock()
        work = Work()
        self.role = HeldRole(
            run.control,
            "trainer",
            nonce=nonce,
            work=work,
            waited_s=lambda: self.waits.seconds,
            pauses=self.pauses,
        )
        self._takes = Counter[str]()
        self._last_waited_s = 0.0
        # no other process publishes weights while this trainer is open; None: not read yet
        self._newest: PolicyVersion | None = None
        self._stop = threading.Event()
        self.nonce = self.role.nonce
        self._taker = BatchTaker(run, self.nonce, self._check, work)
        self.delivered = self._taker.delivered
        self._prefetcher = Prefetcher(run, prefetch_bytes, self.role.ended)

    @property
    def vocabulary(self) -> int | None:
        """The number of the model's token ids. Once set, other ids are quarantined."""
        return self._reader.vocabulary

    @vocabulary.setter
    def vocabulary(self, size: int | None) -> None:
        self._reader.vocabulary = size

    def open(
        self,
        step: int = 0,
        *,
        run_nonce: str = "",
        take_over: bool = False,
        position: Position | None = None,
        regenerate: bool = False,
    ) -> Opening:
        """Become the trainer from a checkpoint of `step` (0: the start), with a new lineage.

        A checkpoint's `position` replaces `step` and `run_nonce`, and restores what a server lost.
        `regenerate` accepts a server that lost everything or freed what follows the checkpoint, and
        generates it again; it needs `position` unless `step` is 0 (ConfigError). Raises RoleHeld if
        another trainer is alive (unless `take_over`, which fences it), LostRun if the server does
        not hold the run or holds it as a new one, LedgerError if `step` is not between the freed
        and the taken steps.
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
        self._newest = None
        # calls of the trainer wait for the end of an outage, however long it lasts
        self._run.store.patience = lambda: not (self._stop.is_set() or self.role.ended.is_set())
        # heartbeats continue after `stop`, while the last step ends: the role is held until `close`
        limits = self._run.limits
        self.role.renew_in_background(lambda: limits.heartbeat_ms / 1000, self._prefetcher.end)
        return opening

    def close(self) -> None:
        """Give up the role, so that the next trainer need not wait."""
        self._prefetcher.close()
        if self.role.thread:
            self.role.close()

    def check_role(self) -> None:
        """Raise Fenced if another trainer was opened.

        Call it before writing files that it reads.
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
        """Wait for `counts` groups of each task for train step `step`, and return them.

        A step that was taken before is returned unchanged; if all counts are 0, the batch is empty
        and the step is not taken. A group that cannot be read or trained (`consumer.handle.reader`)
        is quarantined and replaced (I11). A task that `should_continue_fn` ended supplies what is
        ready; without `strict`, every task does. `waiting` is called about once a second with a
        `WaitReason`. `checkpoint` is called when memory is full of batches that only a checkpoint
        frees: it must write one and commit, or keep only the one of the step before.

        A batch that needs groups of a stopped task waits until somebody has mended the cause and
        resumed the task, however long that takes: a trainer that ended would lose what it has
        trained since its checkpoint. `deadline_s` bounds this wait, too, and `WaitReason.stopped`
        names the task; with `run.task_stops.are_final` set, it raises TaskStopped instead.

        Raises TimeoutError after `deadline_s`; Stopped after `stop`; Fenced if another trainer was
        opened; GroupChanged if a group differs from what was sent; CheckpointNow if memory is full
        and there is no `checkpoint`; and ExpiredBatch, NoBatch, ProducerGone, WeightsRefused as in
        `consumer.handle.wait_rules`.
        """
        self.delivered.check()
        # before the take: groups that left the pool would be forgotten as unwanted
        self._prefetcher.end()
        started = time.monotonic()
        options = WaitOptions(deadline_s, self.producer_timeout_s, waiting, checkpoint)
        with self.waits.running(), self._run.control.explaining_loss("trainer"):
            manifest = self._taker.take(self._run.ledger, step, counts, options, strict=strict)
        waited_s = time.monotonic() - started
        known = self._prefetcher.pop([entry.payload for entry in manifest.entries])
        manifest, groups = self._taker.read_whole(
            self._run.ledger, manifest, self._reader, known, options, strict=strict
        )
        if self._newest is None:
            self._newest = self._run.control.state().weights
        status = status_of_taken(self._run, step, self._newest)
        batch = Batch(step, groups, manifest, waited_s, status)
        self._takes["groups"] += len(groups)
        self._takes["bytes"] += sum(entry.payload.size for entry in manifest.entries)
        self._takes["batches"] += 1
        self._last_waited_s = waited_s
        self._prefetcher.begin(counts)
        if manifest.is_recorded:
            for observer in self._run.observers:
                observer.delivered(manifest, groups, self.lineage, waited_s)
        return batch

    def _check(self) -> None:
        check_not_abandoned()
        self.role.check()
        if self._stop.is_set():
            raise Stopped

    def commit(self, step: int, *, keep: int) -> None:
        """Record that the checkpoint of `step` is durable, and free batches up to `keep`.

        `keep`: the oldest checkpoint that is kept. Raises GroupChanged.
        """
        self.delivered.check()
        self._run.ledger.commit(self.nonce, step, keep)

    def note_draws(self, position: Position) -> None:
        """Record in a position, before its checkpoint is written, which draws were skipped.

        Then they are not drawn again, even if the server loses its data.
        """
        note_draws(self._run.context, position)

    @contextmanager
    def paused(self, mode: PauseMode) -> Iterator[float]:
        """Pause the run for this block; yield the seconds until the last receipt.

        Raises Stopped.
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
        """Pause the run, and return the seconds until the last live worker's receipt.

        A worker that is silent for `pause_timeout_s` is fenced. `lanes` stay open: "eval" allows
        evaluations (not in keep mode, which freezes engines).
        """
        started = time.monotonic()
        self._run.control.set_mode("trainer", Mode(mode), lanes=lanes, nonce=self.nonce)
        self._run.receipts.wait(fences=True, watch=lambda silent: self._check() if silent else None)
        seconds = time.monotonic() - started
        self.pauses.add(seconds)
        return seconds

    def continue_(self) -> None:
        """Continue the run, unless the operator has paused it."""
        self._run.control.set_mode("trainer", Mode.RUN, nonce=self.nonce)

    def finish(self) -> None:
        """End the run: workers and producer finish their work and exit."""
        self._run.control.set_mode("trainer", Mode.FINISH, nonce=self.nonce)

    def publish_weights(self, version: int, path: str, checksum: str) -> PolicyVersion:
        """Announce the weights after train step `version` as the newest: workers load them next.

        `path` and `checksum`: from a sender's `write` (`FolderSender`). Raises ModelError, and
        announces nothing, unless these weights are there, by file names, sizes and headers;
        GroupChanged.
        """
        return self._publish_weights("newest", version, path, checksum).weights

    def announce_weights(self, version: int, path: str, checksum: str) -> ControlState:
        """Let the workers fetch weights ahead of `publish_weights`; return the control state.

        Until then they sample and claim with the newest ones. Raises as `publish_weights`.
        """
        return self._publish_weights("next", version, path, checksum)

    def wait_until_fetched(self, announced: ControlState, unless: threading.Event) -> None:
        """Wait until every live worker has fetched the announced weights, or failed to.

        Ends early once `unless` is set, after `stop`, and after the run's `pause_timeout_s`.
        """
        until = time.monotonic() + self._run.limits.pause_timeout_s
        while time.monotonic() < until and not self._stop.is_set():
            if unless.wait(0.1) or not self._run.receipts.silent(announced.epoch):
                return
            self.role.check()

    def _publish_weights(
        self, stage: Literal["next", "newest"], version: int, path: str, checksum: str
    ) -> ControlState:
        self.delivered.check()
        weights = PolicyVersion(self.lineage, version)
        try:
            url = path.rpartition("/")[0] if is_url(path) else None
            receiver = WeightsReceiver(self._run.store, self._run.keys, url)
            receiver.check(PublishedWeights(path, checksum))
        except (OSError, WireError, ModelError) as error:
            raise ModelError(
                f"the weights {weights} in {path!r} are not announced: {error}",
                hint="let FolderSender.write write the folder, with its manifest, and pass on what "
                "it returns; or call `publish`",
            ) from error
        state = self._run.control.publish_weights(self.nonce, weights, path, checksum, stage=stage)
        self._newest = state.weights
        return state

    def evaluate(
        self,
        task: str,
        count: int,
        *,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Evaluated:
        """Wait for `count` problems of an evaluation task, answered by the newest weights.

        Each is drawn once; those of which every try failed are in `failed` of the result. What an
        interrupted evaluation left is used if it is of these weights, else discarded. `waiting` and
        `checkpoint` as in `take_batch`.
        """
        options = WaitOptions(None, self.producer_timeout_s, waiting, checkpoint)
        return self.begin_evaluation(task, count).finish(options, allows_newer=False)

    def begin_evaluation(self, task: str, count: int) -> EvaluationRound:
        """Begin an evaluation to `poll` between steps; finish it before the task's next one."""
        return EvaluationRound(self._run, self.nonce, self._taker, task, count)

    def finish_evaluation(
        self,
        pending: EvaluationRound,
        *,
        waiting: Waiting | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Evaluated:
        options = WaitOptions(None, self.producer_timeout_s, waiting, checkpoint)
        return pending.finish(options, allows_newer=True)

    def report(self, step: int, metrics: Mapping[str, float], *, task: str = "") -> None:
        """Report metrics of train step `step`, or of an evaluation of `task` after it.

        The server keeps those in `buffer.control.events.REPORTED`; observers get all. Raises
        Fenced, and ConfigError for a value that is no number.
        """
        try:
            # numbers of numpy and torch, too
            numbers = {str(name): float(value) for name, value in metrics.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the metrics reported for step {step} are not all numbers: {error}",
                hint="report(step, {name: number, …})",
            ) from error
        for observer in () if task else self._run.observers:
            numbers |= observer.measured(step)
        self._run.control.report(self.nonce, step, numbers, task=task)
        for observer in self._run.observers:
            observer.reported(step, numbers, task)

    def metrics(self) -> dict[str, float]:
        """Return the metrics take/*, prefetch/* and pause/* (consumer/README.md)."""
        return {
            **{f"take/{name}": float(self._takes[name]) for name in ("batches", "groups", "bytes")},
            "take/waited_s": self.waits.seconds,
            "take/last_waited_s": self._last_waited_s,
            "take/quarantined_groups": float(self._taker.quarantined),
            "prefetch/used_groups": float(self._prefetcher.used),
            "prefetch/read_groups": float(self._prefetcher.read),
            "prefetch/held_bytes": float(self._prefetcher.held_bytes),
            **self.pause_metrics(),
        }

    def pause_metrics(self) -> dict[str, float]:
        """Return the number of pauses and two quantiles of their seconds, if there were any."""
        if not self.pauses.count:
            return {}
        return {
            "pause/count": float(self.pauses.count),
            "pause/p50_s": self.pauses.quantile_s(0.5),
            "pause/p99_s": self.pauses.quantile_s(0.99),
        }

    def events(
        self, after: str = START, *, limit: int = 500, block_ms: int | None = None
    ) -> list[tuple[str, Event]]:
        """Return (id, event), oldest first; wait up to `block_ms` ms for the first."""
        return self._run.events.read(after, limit=limit, block_ms=block_ms)
