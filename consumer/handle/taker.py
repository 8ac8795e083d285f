"""The trainer's way to a batch: take it, wait for it, read it, replace unusable groups (I11)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

from buffer.control.control import Work
from buffer.errors import (
    CheckpointNow,
    ExpiredBatch,
    LedgerError,
    NoBatch,
    PayloadMissing,
    TaskStopped,
)
from buffer.ledger.ledger import BatchLedger
from buffer.manifest import Manifest, NotReady
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.batch import DeliveredGroups
from consumer.handle.reader import NOTHING, BatchReader, Known
from consumer.handle.wait_rules import BatchOutlook, WaitReason, explain

log = logging.getLogger("rolloutmq.consumer")

Waiting = Callable[[WaitReason], None]
Checkpoint = Callable[[], object]

POLL_S = 1.0  # longest wait for a wake-up before the ledger is asked again


class WaitClock:
    """Adds up the time that one thread waits; any thread may read it.

    Heartbeats report it, and an autoscaler sizes the fleet by it.
    """

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds waited so far, including a wait that is not over."""
        ended_s = self._ended_s
        # read once: the waiting thread may reset it at any time
        since = self._since
        return ended_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.monotonic()
        self._since = started
        try:
            yield
        finally:
            self._since = None
            self._ended_s += time.monotonic() - started


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """How a call waits for a batch; see `RolloutConsumer.take_batch`."""

    deadline_s: float | None = None
    producer_timeout_s: float | None = None  # to wait while no producer is alive; None: forever
    waiting: Waiting | None = None
    checkpoint: Checkpoint | None = None


class BatchTaker:
    """Takes and reads batches for the trainer `nonce`; replaces unusable groups without a limit.

    The server bars workers that submit too many of these (quarantine.lua). `check` raises what ends
    a wait. `work` is told which stopped tasks it waits for.
    """

    def __init__(self, run: Run, nonce: str, check: Callable[[], None], work: Work) -> None:
        self._run = run
        self._nonce = nonce
        self._check = check
        self._work = work
        self.quarantined = 0
        self.delivered = DeliveredGroups()

    def take(
        self,
        ledger: BatchLedger,
        step: int,
        counts: Mapping[str, int],
        options: WaitOptions,
        *,
        strict: bool = True,
    ) -> Manifest:
        """Wait until batch `step` is taken, with `counts` groups of each task.

        A task that `should_continue_fn` ended gives less; without `strict`, take what is ready.
        Raises as `RolloutConsumer.take_batch`.
        """
        ask = partial(ledger.take, self._nonce, step, strict=strict)
        return self.wait(ledger, ask, step, counts, options)

    def refill(self, ledger: BatchLedger, manifest: Manifest, options: WaitOptions) -> Manifest:
        """Wait until every slot of the batch has a group, or no more will come.

        Raises LedgerError if a batch without empty slots is empty.
        """
        step = manifest.step
        if not manifest.open_places:
            raise LedgerError(
                f"the batch of step {step} is empty", hint="commit the step to continue without it"
            )
        try:
            return self.wait(
                ledger, lambda _: ledger.refill(self._nonce, step), step, manifest.open_places,
                options, stops_are_final=bool(manifest.entries),
            )  # fmt: skip
        except (TaskStopped, TimeoutError, NoBatch, ExpiredBatch) as error:
            if not manifest.entries:
                raise
            log.warning("the batch of step %s stays smaller: %s", step, error)
            return ledger.manifest(step) or manifest

    def wait(
        self,
        ledger: BatchLedger,
        ask: Callable[[Mapping[str, int]], Manifest | NotReady],
        step: int,
        counts: Mapping[str, int],
        options: WaitOptions,
        *,
        stops_are_final: bool = False,
    ) -> Manifest:
        """Call `ask` until the batch is ready: at each wake-up, at least once a second."""
        limit_s = float("inf") if options.deadline_s is None else options.deadline_s
        deadline = time.monotonic() + limit_s
        next_report = 0.0
        wanted = counts
        outlook = BatchOutlook(
            self._run,
            step,
            options.producer_timeout_s,
            work=self._work,
            trains=ledger.name == "train",
            stops_are_final=stops_are_final or self._run.task_stops.are_final,
        )
        with closing(outlook):
            while True:
                answer = ask(wanted)
                if isinstance(answer, Manifest):
                    return answer
                self._check()
                now = time.monotonic()
                if now >= deadline:
                    reason = explain(self._run, step, answer)
                    raise TimeoutError(f"step {step} after {limit_s:g} s: {reason}")
                wanted = outlook.obtainable(counts, answer)
                outlook.check(answer)
                if options.waiting and now >= next_report:
                    next_report = now + 1.0  # every group wakes it, and a report costs requests
                    options.waiting(explain(self._run, step, answer))
                if answer.checkpoint_now:
                    _free_memory(step, options)
                self._run.store.wait(self._run.keys.wake_up("trainer"), min(POLL_S, deadline - now))
                self._check()

    def read(
        self, ledger: BatchLedger, manifest: Manifest, reader: BatchReader, known: Known = NOTHING
    ) -> tuple[Manifest, list[RolloutGroup]]:
        """Read the groups of a batch, and return its manifest as it is then.

        An unusable group is quarantined and replaced by a ready one; without one, the batch gets
        smaller, and may be empty.
        """
        while True:
            groups, problems = reader.read(manifest, known)
            if not problems:
                self.delivered.add(groups)
                return manifest, groups
            known = NOTHING
            step = manifest.step
            for entry in [entry for entry in manifest.entries if entry.gid in problems]:
                reason = problems[entry.gid]
                log.error(
                    "group quarantined in step %s: %s", step, reason, extra={"gid": entry.gid}
                )
                self.quarantined += 1
                # bytes that the server lost, in a failover for example, would bar honest workers
                is_fault = not reason.startswith(PayloadMissing.__name__)
                manifest = ledger.quarantine(
                    self._nonce, step, entry, reason, is_workers_fault=is_fault
                )

    def read_whole(
        self,
        ledger: BatchLedger,
        manifest: Manifest,
        reader: BatchReader,
        known: Known,
        options: WaitOptions,
        *,
        strict: bool,
    ) -> tuple[Manifest, list[RolloutGroup]]:
        """Read as `read` does, and wait for groups in place of those that were quarantined.

        A batch that was smaller before stays so, as it may have been trained (I5), unless it is
        empty.
        """
        before = manifest.open_places
        manifest, groups = self.read(ledger, manifest, reader, known)
        if not manifest.is_recorded:
            return manifest, groups
        while not manifest.entries or (strict and manifest.open_places - before):
            filled = self.refill(ledger, manifest, options)
            before = filled.open_places
            manifest, groups = self.read(ledger, filled, reader)
        return manifest, groups


def _free_memory(step: int, options: WaitOptions) -> None:
    if options.checkpoint is None:
        raise CheckpointNow(
            f"memory is full of batches that are not committed, before step {step} can be taken",
            hint="write a checkpoint, commit(step, keep=…), then take the step again; or pass "
            "checkpoint= to take_batch",
        )
    options.checkpoint()
