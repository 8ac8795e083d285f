"""What one train step consumes, and what interrupts the wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from buffer.group import RolloutGroup
from buffer.manifest import Manifest


class Stopped(Exception):
    """`stop` was called, or whoever awaited was cancelled. Not an error: the step can be taken later."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one train step consumes. `waited_s`: how long the trainer stood still for it."""

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest
    waited_s: float
