"""What one train step consumes, and what interrupts the wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from buffer.batch_status import ProduceBatchStatus
from buffer.group import RolloutGroup
from buffer.manifest import Manifest


class Stopped(Exception):
    """`stop` was called, the run is finished, or whoever awaited was cancelled. Not an error: nothing was taken."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one train step consumes. `waited_s`: how long the trainer stood still for it.

    `status` EXPIRED_BATCH: the newest weights can serve no later step, so train this one, then publish.
    """

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest
    waited_s: float
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL
