"""The groups of a batch that was taken: read, decoded, and what cannot be is put aside (I11)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from buffer.batches.ledger import BatchLedger
from buffer.errors import (
    ExpiredBatch,
    LedgerError,
    NoBatch,
    PayloadMissing,
    RolloutMQError,
    TaskStopped,
    WireError,
)
from buffer.model.group import RolloutGroup
from buffer.model.job import PayloadRef
from buffer.model.manifest import Manifest, ManifestEntry
from buffer.run import Run
from consumer.batches.wait import BatchWait

log = logging.getLogger("rolloutmq.consumer")

Known = Mapping[PayloadRef, RolloutGroup]
"""Groups that were read ahead."""


class BatchReader:
    """Reads for the trainer with that nonce.

    However many groups of a batch are bad, the trainer goes on with others: what one worker can
    spoil is bounded by the server, which bars it (`quarantine.lua`).
    """

    def __init__(self, run: Run, nonce: str) -> None:
        self._run = run
        self._nonce = nonce
        self.quarantined = 0
        """groups that were put aside, in all"""

    def read(
        self, ledger: BatchLedger, manifest: Manifest, known: Known | None = None
    ) -> tuple[Manifest, list[RolloutGroup]]:
        """The groups of a batch. One whose bytes are gone, damaged or no group is swapped for
        another that is ready, and told of; where none is, the batch is smaller, and may be empty.
        """
        may_try_again = True
        while True:
            try:
                return manifest, self._run.buffer.load(manifest, known) if manifest.entries else []
            except (WireError, PayloadMissing):
                bad = list(self._bad(manifest))
                if not bad and not may_try_again:
                    raise  # together they cannot be read, one by one they can: there is nobody to put aside
                known = None
                may_try_again = bool(bad)
            for entry, error in bad:
                manifest = self._put_aside(
                    ledger, manifest.step, entry, f"{type(error).__name__}: {error}"
                )

    def read_whole(
        self,
        ledger: BatchLedger,
        manifest: Manifest,
        known: Known | None,
        wait: BatchWait,
        *,
        strict: bool,
    ) -> tuple[Manifest, list[RolloutGroup]]:
        """`read`, and wait for groups in the places of those that were put aside meanwhile.

        A batch that was smaller before stays so: it may have been trained like that (I5). Only an
        empty one cannot.
        """
        before = manifest.open_places
        manifest, groups = self.read(ledger, manifest, known)
        while not manifest.entries or (strict and manifest.open_places - before):
            filled = self.refill(ledger, manifest, wait)
            before = filled.open_places
            manifest, groups = self.read(ledger, filled)
        return manifest, groups

    def refill(self, ledger: BatchLedger, manifest: Manifest, wait: BatchWait) -> Manifest:
        """The batch with a group in every place; in fewer where no more will come, and there are
        some to go on with.
        """
        step = manifest.step
        if not manifest.open_places:
            raise LedgerError(
                f"the batch of step {step} is empty", hint="commit the step to go on without it"
            )
        try:
            return wait.until_taken(
                step, manifest.open_places, lambda _: ledger.refill(self._nonce, step)
            )
        except (TaskStopped, TimeoutError, NoBatch, ExpiredBatch) as error:
            if not manifest.entries:
                raise
            log.warning("the batch of step %s stays smaller: %s", step, error)
            return ledger.manifest(step) or manifest

    def put_aside(self, ledger: BatchLedger, step: int, reasons: Mapping[str, str]) -> Manifest:
        """Quarantine the groups of these gids, each with why; the new manifest. LedgerError where
        there is none.
        """
        manifest = ledger.manifest(step)
        for entry in manifest.entries if manifest else ():
            if entry.gid in reasons:
                manifest = self._put_aside(ledger, step, entry, reasons[entry.gid])
        if manifest is None:
            raise LedgerError(f"the manifest of step {step} is gone")
        return manifest

    def _put_aside(
        self, ledger: BatchLedger, step: int, entry: ManifestEntry, why: str
    ) -> Manifest:
        log.error("group quarantined in step %s: %s", step, why, extra={"gid": entry.gid})
        self.quarantined += 1
        # what the server has lost, in a failover say, would bar every honest worker of the run
        fault = not why.startswith(PayloadMissing.__name__)
        return ledger.quarantine(self._nonce, step, entry, why, is_workers_fault=fault)

    def _bad(self, manifest: Manifest) -> Iterator[tuple[ManifestEntry, RolloutMQError]]:
        for entry in manifest.entries:
            try:
                self._run.buffer.read(entry.payload)
            except (WireError, PayloadMissing) as error:
                yield entry, error
