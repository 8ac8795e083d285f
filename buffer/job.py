from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Literal

from buffer.errors import RunDamaged
from buffer.ids import split_group_id
from buffer.wire.group import RolloutGroup

ReleaseKind = Literal["handback", "aborted", "expired", "skipped", "failed", "lost"]


@dataclass(frozen=True, slots=True)
class Job:
    """The right to generate one group, until its lease expires; `aborts` counts interruptions."""

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
        """Return the payload of the prompt, from which the group can start again."""
        return PayloadRef(self.gid, "init", 1, 0, "")

    @property
    def is_begun(self) -> bool:
        """Return whether the payload is the result of an earlier claim, not the prompt."""
        return self.payload.token != self.prompt.token

    @classmethod
    def parse(cls, row: Sequence[str], token: str) -> Job:
        """Parse one row of the reply to a claim. Raises RunDamaged."""
        gid, lane, tries, payload, chunks, size, crc, aborts = row
        numbers = (chunks, size, tries, aborts or "0")
        if not all(re.fullmatch(r"-?\d{1,16}", number) for number in numbers) or chunks == "0":
            raise RunDamaged(
                f"the record of {gid} does not say where its bytes are: {list(row)}",
                hint="something else wrote to it; `rolloutmq fsck` lists all that is wrong",
            )
        ref = PayloadRef(gid, payload, int(chunks), int(size), crc if payload != "init" else "")
        return cls(gid, token, lane, int(tries), ref, int(aborts or 0))


def digest_of(jobs: Iterable[Job]) -> int:
    """Return the number by which a worker and `lua/shared/workers.lua` compare held groups."""
    marks = (sha1(f"{job.gid} {job.token}".encode(), usedforsecurity=False) for job in jobs)
    return sum(int(mark.hexdigest()[:10], 16) for mark in marks)


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """A group that was ended because it can serve no train step any more.

    `unmade_tokens`: the most that its rollouts could still have generated. `oldest`: the oldest
    policy version of its tokens, by lineage of weights.
    """

    tokens: int
    unmade_tokens: int
    oldest: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens that a worker's engine sampled, for the account of tokens (`lua/shared/tokens.lua`).

    `made`: under the claim, with discarded ones. `expired`: of earlier claims, discarded because
    they were too old. `total`: by the worker for this task so far, `closed` of them under claims
    that ended.
    """

    made: int
    expired: int
    total: int
    closed: int

    def text(self, kept: int = 0) -> str:
        """Return the argument of scripts; `kept`: in the group that is submitted."""
        return f"{self.made} {kept} {self.expired} {self.total} {self.closed}"


@dataclass(frozen=True, slots=True)
class Result:
    """The group that a worker made of a job. `new_tokens`: generated since the claim.

    `sampled`: None from a worker that does not count.
    """

    job: Job
    group: RolloutGroup
    new_tokens: int
    filtered: bool = False
    sampled: SampledTokens | None = None


@dataclass(frozen=True, slots=True)
class PayloadRef:
    gid: str
    token: str
    chunks: int
    size: int
    crc: str
