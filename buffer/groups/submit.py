"""Submit: finished groups on their way from a worker into the pools (`submit.lua`).

A group is checked and encoded, its bytes are uploaded, and the script moves it. Several groups of a
task share one call, which judges each by itself: one refused group does not hold up others (I2).

    SET SET … SET  submit(group, group, …)   one round trip
       worker or server dies here ▶ no group has moved: the bytes expire, the groups are submitted
                                    again, or their leases run out
                   server dies here ▶ a script is whole on disk or not at all
                                      reply lost ▶ submitted again: OK for groups that have moved
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, cast

from buffer.errors import PayloadMissing, StoreUnavailable, WireError
from buffer.groups.claim import fenced
from buffer.job import Job, PayloadRef, Result
from buffer.limits import RunLimits
from buffer.redis.bulk_io import Command, Pieces
from buffer.redis.payloads import PayloadStore, SetCommand, by_size
from buffer.redis.scripts import Arg, ScriptCall, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import GROUP_TIME, RolloutGroup
from buffer.wire.rollout import Status

GROUPS_PER_TRIP = 32  # bounds what is sent again after a lost connection

_LARGE_BYTES = 32 * 2**10  # a server reads a value of this size by itself, smaller ones together


@dataclass(frozen=True, slots=True)
class Stored:
    """A submitted group, not kept if filtered. `arrival`: its number in its task, by arrival."""

    status: Status
    arrival: int


SubmitOutcome = Stored | Exception
"""The result for one submitted group.

An exception is that group's own, and nothing of it was changed: `Fenced` (the lease was lost),
`PayloadMissing` (its bytes did not arrive), `WireError` (it cannot be encoded, or is not the result
of its job), or `ScriptError` (a number is out of bounds).
"""


@dataclass(slots=True)
class PreparedResult:
    """One result on its way: what stores its bytes, and its arguments of `submit.lua` by name.

    Its outcome is known at last, or from the beginning if it cannot be submitted.
    """

    result: Result
    sets: list[SetCommand] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    outcome: SubmitOutcome | None = None


class Submission:
    """Submits results of one worker; see `ReplayBuffer.submit_many`."""

    def __init__(self, context: RunContext, payloads: PayloadStore) -> None:
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads

    def submit(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit results; return their outcomes. After StoreUnavailable, submit again (I13)."""
        units = []
        for start in range(0, len(results), GROUPS_PER_TRIP):
            some = self.prepare(results[start : start + GROUPS_PER_TRIP])
            units += some
            ready = [unit for unit in some if unit.outcome is None]
            try:
                self._send(worker, ready)
            except StoreUnavailable:
                raise
            except Exception:
                # one wrong group fails the call of all: each is sent alone, and its error is its
                # outcome; a group that was stored gets the same reply again (I13)
                for unit in ready:
                    try:
                        self._send(worker, [unit])
                    except StoreUnavailable:
                        raise
                    except Exception as error:
                        unit.outcome = error
        return [cast(SubmitOutcome, unit.outcome) for unit in units]

    def prepare(self, results: Sequence[Result]) -> list[PreparedResult]:
        """Check and encode results; the outcome of a wrong one is its error.

        All checks are here, before the upload: later ones only protect the trainer from bytes that
        were damaged on their way.
        """
        units = [PreparedResult(result) for result in results]
        encoded = group_bytes.pieces_each([result.group for result in results])
        for unit, data in zip(units, encoded, strict=True):
            job, group = unit.result.job, unit.result.group
            try:
                if isinstance(data, Exception):
                    raise data
                if group.status not in (Status.COMPLETED, Status.ABORTED):
                    raise WireError(
                        f"group {group.gid} is {group.status}",
                        hint="only completed or aborted groups are submitted",
                    )
                ref, unit.sets = to_store(self._payloads, job, group, data)
                unit.arguments = self.arguments(unit.result, ref)
            except Exception as error:  # it concerns this group alone
                unit.outcome = error
        return units

    def arguments(self, result: Result, ref: PayloadRef) -> dict[str, Any]:
        """Return the arguments of `submit.lua` for a result whose bytes are stored at `ref`."""
        group = result.group
        is_useless = group.status is Status.COMPLETED and result.filtered
        status = Status.FILTERED if is_useless else group.status
        scores = group.scores.tolist() if status is not Status.ABORTED else ()
        counted = [score for score in scores if math.isfinite(score)]
        return described(group, status, ref, self._limits) | {
            "gid": group.gid,
            "token": ref.token,
            "tokens": result.new_tokens,
            "sampled": result.sampled and result.sampled.text(group.sampled_tokens),
            "aged": group.tokens_by_weights() if self._limits.token_threshold else None,
            "length": sum(group.lengths.tolist()),
            "reward_sum": f"{math.fsum(counted):.6g}",
            "reward_count": len(counted),
            "unparsed": group.unparsed,
            "truncated": int(group.truncated.sum()),
            "ms": int(1000 * float(group.shared.extra.get(GROUP_TIME) or 0.0)),
        }

    def call(self, worker: str, task: str, units: Sequence[Mapping[str, Any]]) -> ScriptCall:
        """Return the call of `submit.lua` for the `arguments` of results of one task."""
        keys = self._keys
        chunks = [
            name
            for unit in units
            for name in keys.payload_chunks(unit["gid"], unit["token"], unit["chunks"])
        ]
        arguments = {
            "task": task,
            "patience": self._limits.setting(task, "max_consecutive_filtered"),
            "token_lead": self._limits.token_lead(task),
        }
        slots = keys.slots(task=task, worker=worker)
        return ScriptCall("submit", slots, arguments, chunks, units)

    def _send(self, worker: str, units: Sequence[PreparedResult]) -> None:
        """Store and submit units in one round trip, with a call for each task and 8 MiB."""
        commands: list[Command | ScriptCall] = []
        in_order = []
        task_of = attrgetter("result.group.task")
        for task, of_task in groupby(sorted(units, key=task_of), task_of):
            for some in by_size((unit.arguments["size"], unit) for unit in of_task):
                in_order += some
                # a server that writes to disk before it answers writes once for all small commands
                # in a row, so large values come first
                sets = [command for unit in some for command in unit.sets]
                sets.sort(key=lambda command: sum(map(len, command[2])) < _LARGE_BYTES)
                commands += sets
                commands.append(self.call(worker, task, [unit.arguments for unit in some]))
        answers = self._store.send("submit", commands, durable=True)
        calls = zip(commands, answers, strict=True)
        parts = [part for call, reply in calls if isinstance(call, ScriptCall) for part in reply]
        for unit, *reply in zip(in_order, parts[::2], parts[1::2], strict=True):
            job = unit.result.job
            match reply:
                case ["OK", arrival] if arrival:
                    unit.outcome = Stored(Status(unit.arguments["status"]), int(arrival))
                case ["FENCED", _]:
                    unit.outcome = fenced(job)
                case ["MISSING", size]:
                    unit.outcome = PayloadMissing(
                        f"group {job.gid}: only {size} bytes arrived", hint="submit it again"
                    )
                case _:
                    raise unknown_reply("submit", reply)


def to_store(
    payloads: PayloadStore, job: Job, group: RolloutGroup, data: Pieces
) -> tuple[PayloadRef, list[SetCommand]]:
    """Return where a claim stores the bytes of its group, and the commands.

    Raises GroupChanged, and WireError for a group that is not that of the job.
    """
    if (group.gid, group.task) != (job.gid, job.task):
        raise WireError(
            f"group {group.gid} of task {group.task!r} was given as the result of {job.gid}",
            hint="give each job the group that was made of it",
        )
    made = payloads.commands(job.gid, job.token, data)
    # after the checksum: wrong bytes must not have a right one
    group.check_unchanged()
    return made


def described(
    group: RolloutGroup,
    status: Status,
    ref: PayloadRef,
    limits: RunLimits,
) -> dict[str, Arg]:
    """Return the arguments that describe a group of this status and its bytes to a script."""
    return {
        "status": status.value,
        "samples": len(group),
        "size": ref.size,
        "crc": ref.crc,
        "chunks": ref.chunks,
        "made_by": group.made_by(limits.token_lead(group.task) is not None),
    }
