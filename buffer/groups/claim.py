"""The replies of the job queue's scripts as types: claimed jobs, enqueued draws, moved groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from buffer.control.control import STATE_FIELDS, ControlState
from buffer.errors import Fenced, GroupHeld, PayloadMissing
from buffer.job import Job
from buffer.redis.scripts import unknown_reply

Refusal = Literal["PAUSED", "STALE", "UNKNOWN", "FULL", "BARRED"]

JOBS_FROM = 1 + len(STATE_FIELDS)  # where the jobs begin in a reply of `claim.lua`


@dataclass(frozen=True, slots=True)
class Claim:
    """The jobs that a worker got, or `refusal`, which is None when the queues are empty.

    `control` is None for a worker whose registration is unknown.
    """

    control: ControlState | None
    jobs: list[Job]
    refusal: Refusal | None = None

    @classmethod
    def parse(cls, reply: Sequence[str], token: str) -> Claim:
        match reply:
            case ["OK", *_]:
                rows = [reply[i : i + 8] for i in range(JOBS_FROM, len(reply), 8)]
                return cls(
                    ControlState.parse(reply[1:JOBS_FROM]), [Job.parse(row, token) for row in rows]
                )
            case ["UNKNOWN"]:
                return cls(None, [], "UNKNOWN")
            case [("PAUSED" | "STALE" | "FULL" | "BARRED") as refusal, *_]:
                return cls(ControlState.parse(reply[1:JOBS_FROM]), [], refusal)
        raise unknown_reply("claim", reply)


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The number of enqueued jobs, and the cursor: where the next draw begins.

    `refusal`: CLOSED (the lane is closed), FULL (the run holds too many payload bytes, I12),
    STOPPED (too many tries of the task failed in a row, I11).
    """

    count: int
    cursor: int
    refusal: str = ""

    @classmethod
    def parse(cls, reply: Sequence[str], cursor: int) -> Enqueued:
        match reply:
            case ["OK", count, moved_cursor]:
                return cls(int(count), int(moved_cursor))
            case ["CURSOR", actual_cursor]:
                return cls(0, int(actual_cursor))
            case [("CLOSED" | "FULL" | "STOPPED") as refusal, *_]:
                return cls(0, cursor, refusal)
            case ["NO_PAYLOAD", gid]:
                raise PayloadMissing(
                    f"the prompt of {gid} is not stored", hint="write it, then enqueue again"
                )
        raise unknown_reply("enqueue", reply)


@dataclass(frozen=True, slots=True)
class Reaped:
    """The groups of expired leases. `grace_ms`: time left of the grace after an outage (I11)."""

    waiting: int = 0
    buried: int = 0
    gone_workers: int = 0
    grace_ms: int = 0

    @property
    def groups(self) -> int:
        return self.waiting + self.buried

    @classmethod
    def parse(cls, reply: Sequence[str]) -> Reaped:
        match reply:
            case ["OK", waiting, buried, gone_workers]:
                return cls(int(waiting), int(buried), int(gone_workers))
            case ["GRACE", grace_ms]:
                return cls(grace_ms=int(grace_ms))
        raise unknown_reply("reap", reply)


def fenced(job: Job) -> Fenced:
    return Fenced(f"group {job.gid}: the lease of token {job.token[:8]}… is gone")


def stage_before(reply: Sequence[str], gid: str) -> str:
    """Return where `requeue.lua` or `drop.lua` moved a group from. Raises GroupHeld."""
    match reply:
        case ["OK", stage]:
            return str(stage)
        case ["RUNNING", worker]:
            raise GroupHeld(
                f"{gid} runs on {worker}", hint="name that worker to revoke its lease, or fence it"
            )
        case ["TAKEN", batch]:
            raise GroupHeld(f"{gid} is in batch {batch}", hint="only the trainer can remove it")
        case ["ENDED", stage]:
            raise has_ended(gid, stage)
        case ["UNKNOWN"]:
            raise never_started(gid)
    raise unknown_reply("requeue or drop", reply)


def has_ended(gid: str, stage: str) -> GroupHeld:
    return GroupHeld(f"{gid} has ended: it is {stage}")


def never_started(gid: str) -> GroupHeld:
    return GroupHeld(f"{gid} was never started", hint="see rolloutmq ls")
