"""What the waiting line hands out: jobs, and the answers to those who claim and start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from buffer.control.control import ControlState
from buffer.model.job import Job

Refusal = Literal["PAUSED", "STALE", "UNKNOWN", "FULL", "BARRED"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim brought: jobs, or why none (`refusal`; None with no jobs: the line is empty)."""

    control: ControlState | None
    jobs: list[Job]
    refusal: Refusal | None = None

    @classmethod
    def parse(cls, reply: Sequence[str], token: str) -> Claim:
        """The reply of `claim.lua`."""
        match reply[0]:
            case "UNKNOWN":
                return cls(None, [], "UNKNOWN")
            case "PAUSED" | "STALE" | "FULL" | "BARRED" as refusal:
                return cls(ControlState.parse(reply[1:7]), [], refusal)
        rows = [reply[i : i + 8] for i in range(7, len(reply), 8)]
        return cls(ControlState.parse(reply[1:7]), [Job.parse(row, token) for row in rows])


@dataclass(frozen=True, slots=True)
class Enqueued:
    """`count` jobs were started; the cursor is where the next draw begins.

    `refusal`: why there could be none: CLOSED (the lane is shut), FULL (so many payload bytes are
    held, I12), STOPPED (so many tries of the task failed one after the other, I11).
    """

    count: int
    cursor: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of leases that ran out. `grace_ms`: how long all are still spared after an outage
    (I11).
    """

    waiting: int = 0
    buried: int = 0
    gone_workers: int = 0
    grace_ms: int = 0

    @property
    def groups(self) -> int:
        return self.waiting + self.buried
