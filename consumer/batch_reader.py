"""The groups of a batch that was taken: read, decoded, and what cannot be is put aside (I11)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from buffer.errors import LedgerError, PayloadMissing, RolloutMQError, WireError
from buffer.group import RolloutGroup
from buffer.ledger import BatchLedger
from buffer.manifest import Manifest, ManifestEntry
from buffer.payloads import PayloadRef
from buffer.run import Run

log = logging.getLogger("rolloutmq.consumer")

MAX_QUARANTINED = 8
"""Bad groups in one batch that are put aside; more than that is not bad luck, and the next one's error is raised."""


class BatchReader:
    """Reads for the trainer with that nonce."""

    def __init__(self, run: Run, nonce: str) -> None:
        self._run, self._nonce = run, nonce
        self.quarantined = 0
        """groups that were put aside, in all"""

    def read(
        self, ledger: BatchLedger, manifest: Manifest, known: Mapping[PayloadRef, RolloutGroup] | None = None
    ) -> tuple[Manifest, list[RolloutGroup]]:
        """The groups of a batch. One whose bytes are gone, damaged or no group is swapped for another, and told of.

        `known`: groups that were read ahead.
        """
        for _ in range(MAX_QUARANTINED):
            try:
                return manifest, self._decode(manifest, known)
            except (WireError, PayloadMissing):
                found = self._find_bad(manifest)
            if found is None:
                continue  # all can be read now
            bad, reason = found
            manifest = self._put_aside(ledger, manifest.step, bad, f"{type(reason).__name__}: {reason}")
        return manifest, self._decode(manifest, known)

    def put_aside(self, ledger: BatchLedger, step: int, reasons: Mapping[str, str]) -> Manifest:
        """Quarantine the groups of these gids, each with why; the new manifest. LedgerError where there is none."""
        manifest = ledger.manifest(step)
        for entry in manifest.entries if manifest else ():
            if entry.gid in reasons:
                manifest = self._put_aside(ledger, step, entry, reasons[entry.gid])
        if manifest is None:
            raise LedgerError(f"the manifest of step {step} is gone")
        return manifest

    def _put_aside(self, ledger: BatchLedger, step: int, entry: ManifestEntry, why: str) -> Manifest:
        log.error("group quarantined in step %s: %s", step, why, extra={"gid": entry.gid})
        self.quarantined += 1
        return ledger.quarantine(self._nonce, step, entry, why)

    def _decode(self, manifest: Manifest, known: Mapping[PayloadRef, RolloutGroup] | None) -> list[RolloutGroup]:
        if not manifest.entries:
            raise LedgerError(
                f"every group of step {manifest.step} was quarantined: the batch is empty",
                hint="`rolloutmq dead` says why; commit the step to go on without it",
            )
        return self._run.buffer.load(manifest, known)

    def _find_bad(self, manifest: Manifest) -> tuple[ManifestEntry, RolloutMQError] | None:
        """The first group that cannot be read, one by one: for the rare case, so that the usual one stays quick."""
        for entry in manifest.entries:
            try:
                self._run.buffer.read(entry.payload)
            except (WireError, PayloadMissing) as error:
                return entry, error
        return None
