"""A job: the right to generate one group, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from buffer.model.group import RolloutGroup
from buffer.model.ids import split_group_id

ReleaseKind = Literal["handback", "aborted", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Job:
    """The right to generate one group, until its lease runs out. `aborts`: how often it was
    interrupted.
    """

    gid: str
    token: str
    lane: str
    tries: int
    payload: PayloadRef
    aborts: int = 0

    @property
    def task(self) -> str:
        return split_group_id(self.gid)[0]

    @property
    def prompt(self) -> PayloadRef:
        """Where the group started from, and may start again."""
        return PayloadRef(self.gid, "init", 1, 0, "")

    @classmethod
    def parse(cls, row: Sequence[str], token: str) -> Job:
        """One group of a claim's reply."""
        gid, lane, tries, payload, chunks, size, crc, aborts = row
        ref = PayloadRef(gid, payload, int(chunks), int(size), crc if payload != "init" else "")
        return cls(gid, token, lane, int(tries), ref, int(aborts or 0))


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker made of a job. `new_tokens`: generated since the claim."""

    job: Job
    group: RolloutGroup
    new_tokens: int
    filtered: bool = False


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """Where the bytes of a group are, and what they must be."""

    gid: str
    token: str
    chunks: int
    size: int
    crc: str
