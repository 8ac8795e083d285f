"""Read the batches of a live run beside its trainer, for a second trainer, a profiler, a dashboard.

    shadow = ShadowConsumer(run)
    for batch in shadow.batches():
        compare(batch.step, batch.groups)
    print(shadow.missed)

It only reads, holds no role, and nothing waits for it: a batch that the run has freed before it was
read is missed. A shadow that must miss none needs [retention] batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from buffer.control.control import Mode
from buffer.errors import PayloadMissing
from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup


@dataclass(frozen=True, slots=True)
class ShadowBatch:
    """A batch that a trainer has taken, with the groups that it got."""

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest


class ShadowConsumer:
    """Follows the batches of a run from the next one on, or from step `first`."""

    def __init__(self, run: Run, *, first: int | None = None) -> None:
        self._run = run
        self._next = run.ledger.steps().taken + 1 if first is None else first
        self.missed: list[int] = []
        """steps that the run had freed"""

    def batches(self) -> Iterator[ShadowBatch]:
        """Yield each batch once it is taken and complete, until the run is finished."""
        events = self._run.events
        last = events.newest()
        while True:
            is_over = self._run.control.state().mode is Mode.FINISH
            taken = self._run.ledger.steps().taken
            while self._next <= taken:
                manifest = self._run.ledger.manifest(self._next)
                if manifest and not manifest.is_complete:
                    break  # groups that could not be read are being replaced
                step, self._next = self._next, self._next + 1
                try:
                    groups = self._run.buffer.load(manifest) if manifest else None
                except PayloadMissing:
                    groups = None
                if manifest is None or groups is None:
                    self.missed.append(step)
                    continue
                yield ShadowBatch(step, groups, manifest)
                taken = self._run.ledger.steps().taken
            if is_over and self._next > taken:
                return
            if news := events.read(last, block_ms=1000):  # then the ledger is asked again
                last = news[-1][0]
