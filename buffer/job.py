"""What the waiting line hands out: jobs, and the answers to those who claim and start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from buffer.control import ControlState
from buffer.keys import split_group_id
from buffer.payloads import PayloadRef

Refusal = Literal["PAUSED", "STALE", "UNKNOWN"]
ReleaseKind = Literal["handback", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class Job:
    """The right to generate one group, until its lease runs out."""

    gid: str
    token: str
    lane: str
    tries: int
    payload: PayloadRef

    @property
    def task(self) -> str:
        return split_group_id(self.gid)[0]

    @classmethod
    def parse(cls, row: Sequence[str], token: str) -> Job:
        """One group of a claim's reply."""
        gid, lane, tries, payload, chunks, size, crc = row
        ref = PayloadRef(gid, payload, int(chunks), int(size), crc if payload != "init" else "")
        return cls(gid, token, lane, int(tries), ref)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim brought: jobs, or why none (`refusal`; None with no jobs: the line is empty)."""

    control: ControlState | None
    jobs: list[Job]
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Enqueued:
    """`count` jobs were started; the cursor is where the next draw begins. `closed`: the lane is shut."""

    count: int
    cursor: int
    closed: bool = False
