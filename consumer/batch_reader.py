"""The groups of a batch that was taken: read, decoded, and what cannot be is put aside (I11)."""

from __future__ import annotations

import logging

from buffer.errors import LedgerError, PayloadMissing, RolloutMQError, WireError
from buffer.group import RolloutGroup
from buffer.ledger import BatchLedger
from buffer.manifest import Manifest, ManifestEntry
from buffer.run import Run

log = logging.getLogger("rolloutmq.consumer")

MAX_QUARANTINED = 8
"""Bad groups in one batch that are put aside; more than that is not bad luck, and the next one's error is raised."""


class BatchReader:
    """Reads for the trainer with that nonce."""

    def __init__(self, run: Run, nonce: str) -> None:
        self._run, self._nonce = run, nonce

    def read(self, ledger: BatchLedger, manifest: Manifest) -> tuple[Manifest, list[RolloutGroup]]:
        """The groups of a batch. One whose bytes are gone, damaged or no group is swapped for another, and told of."""
        for _ in range(MAX_QUARANTINED):
            try:
                return manifest, self._decode(manifest)
            except (WireError, PayloadMissing):
                found = self._find_bad(manifest)
            if found is None:
                continue  # all can be read now
            bad, reason = found
            log.error("group quarantined in step %s: %s", manifest.step, reason, extra={"gid": bad.gid})
            manifest = ledger.quarantine(self._nonce, manifest.step, bad, f"{type(reason).__name__}: {reason}")
        return manifest, self._decode(manifest)

    def _decode(self, manifest: Manifest) -> list[RolloutGroup]:
        if not manifest.entries:
            raise LedgerError(
                f"every group of step {manifest.step} was quarantined: the batch is empty",
                hint="`rolloutmq dead` says why; commit the step to go on without it",
            )
        return self._run.buffer.load(manifest)

    def _find_bad(self, manifest: Manifest) -> tuple[ManifestEntry, RolloutMQError] | None:
        """The first group that cannot be read, one by one: for the rare case, so that the usual one stays quick."""
        for entry in manifest.entries:
            try:
                self._run.buffer.read(entry.payload)
            except (WireError, PayloadMissing) as error:
                return entry, error
        return None
