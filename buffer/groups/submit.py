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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from buffer.errors import PayloadMissing, StoreUnavailable, WireError
from buffer.groups.claim import fenced
from buffer.job import Job, PayloadRef, Result
from buffer.limits import RunLimits
from buffer.redis.connection.bulk_io import Pieces
from buffer.redis.payloads import PayloadStore, SetCommand
from buffer.redis.scripts import Arg, ScriptCall, Upload, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import GROUP_TIME, RolloutGroup
from buffer.wire.rollout import Status

GROUPS_PER_TRIP = 32  # bounds what is sent again after a lost connection

_TOGETHER = 8  # groups that are encoded before the first is sent

_CALL_BYTES = 8 * 2**20  # of payloads: large groups do not wait for each other


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


Unit = dict[str, Any]
"""The arguments of one result in a call of `submit.lua`, by name."""


class Submission:
    """Submits results of one worker; see `ReplayBuffer.submit_many`."""

    def __init__(
        self,
        context: RunContext,
        payloads: PayloadStore,
    ) -> None:
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads

    def submit(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit results; return their outcomes. After StoreUnavailable, submit again (I13)."""
        return [
            outcome
            for start in range(0, len(results), GROUPS_PER_TRIP)
            for outcome in self._together(worker, results[start : start + GROUPS_PER_TRIP])
        ]

    def _together(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit results in one round trip, or if their call is refused, each in one of its own."""
        try:
            return self._round_trip(worker, results)
        except StoreUnavailable:
            raise
        except Exception as error:
            if len(results) == 1:
                return [error]
            # those that have moved are only told so again (I13)
            return [self._together(worker, [result])[0] for result in results]

    def _round_trip(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        outcomes: dict[int, SubmitOutcome] = {}
        sent: list[int] = []
        uploads = _Once(self._uploads(worker, results, outcomes, sent))
        replies = self._store.upload_and_call("submit", self._keys.leases, uploads)
        parts = [part for reply in replies for part in reply]
        for number, *reply in zip(sent, parts[::2], parts[1::2], strict=True):
            outcomes[number] = _outcome(results[number], reply)
        return [outcomes[number] for number in range(len(results))]

    def _uploads(
        self,
        worker: str,
        results: Sequence[Result],
        outcomes: dict[int, SubmitOutcome],
        sent: list[int],
    ) -> Iterator[Upload]:
        """Yield groups, then their call. Failed results go to `outcomes`, others to `sent`."""
        by_task = sorted(range(len(results)), key=lambda number: results[number].group.task)
        for task, numbers in groupby(by_task, lambda number: results[number].group.task):
            units: list[Unit] = []
            for number, data in _encoded(results, list(numbers)):
                try:
                    if isinstance(data, Exception):
                        raise data
                    commands, unit = self.prepare(results[number], data)
                except Exception as error:  # it concerns this group alone
                    outcomes[number] = error
                    continue
                sent.append(number)
                units.append(unit)
                yield commands, None
                if sum(unit["size"] for unit in units) >= _CALL_BYTES:
                    yield (), self.call(worker, task, units)
                    units = []
            if units:
                yield (), self.call(worker, task, units)

    def prepare(self, result: Result, data: Pieces) -> tuple[list[SetCommand], Unit]:
        """Return what stores the bytes of a group, and its unit of a call. Raises what is wrong.

        All checks are here, before the upload: later ones only protect the trainer from bytes that
        were damaged on their way.
        """
        job, group = result.job, result.group
        if group.status not in (Status.COMPLETED, Status.ABORTED):
            raise WireError(
                f"group {group.gid} is {group.status}",
                hint="only completed or aborted groups are submitted",
            )
        ref, commands = to_store(self._payloads, job, group, data)
        return commands, self.unit(result, ref)

    def unit(self, result: Result, ref: PayloadRef) -> Unit:
        """Return the arguments of `submit.lua` for a result whose bytes are stored at `ref`."""
        group = result.group
        status = _final_status(result)
        scores = group.scores.tolist() if status is not Status.ABORTED else ()
        counted = [score for score in scores if math.isfinite(score)]
        return described(group, status, ref, self._limits) | {
            "gid": group.gid,
            "token": ref.token,
            "tokens": result.new_tokens,
            "length": sum(group.lengths.tolist()),
            "reward_sum": f"{math.fsum(counted):.6g}",
            "reward_count": len(counted),
            "unparsed": group.unparsed,
            "truncated": int(group.truncated.sum()),
            "ms": int(1000 * float(group.shared.extra.get(GROUP_TIME) or 0.0)),
        }

    def call(self, worker: str, task: str, units: Sequence[Unit]) -> ScriptCall:
        """Return the call of `submit.lua` for results of one task whose bytes are stored."""
        keys = self._keys
        chunks = [
            name
            for unit in units
            for name in keys.payload_chunks(unit["gid"], unit["token"], unit["chunks"])
        ]
        arguments = {
            "task": task,
            "patience": self._limits.of(task).max_consecutive_filtered,
            "token_lead": self._limits.token_lead(task),
        }
        slots = keys.slots(task=task, worker=worker)
        return ScriptCall(slots, arguments, chunks, units)


class _Once:
    """Uploads that are made while the server receives earlier ones, and kept for a repetition."""

    def __init__(self, making: Iterator[Upload]) -> None:
        self._making = making
        self._made: list[Upload] = []

    def __iter__(self) -> Iterator[Upload]:
        yield from self._made
        for upload in self._making:
            self._made.append(upload)
            yield upload


def _encoded(
    results: Sequence[Result], numbers: Sequence[int]
) -> Iterator[tuple[int, Pieces | Exception]]:
    for start in range(0, len(numbers), _TOGETHER):
        some = numbers[start : start + _TOGETHER]
        yield from zip(some, group_bytes.pieces_each([results[n].group for n in some]), strict=True)


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


def _final_status(result: Result) -> Status:
    if result.group.status is Status.COMPLETED and result.filtered:
        return Status.FILTERED
    return result.group.status


def _outcome(result: Result, reply: Sequence[str]) -> SubmitOutcome:
    job = result.job
    match reply:
        case ["OK", arrival] if arrival:
            return Stored(_final_status(result), int(arrival))
        case ["FENCED", _]:
            return fenced(job)
        case ["MISSING", size]:
            return PayloadMissing(
                f"group {job.gid}: only {size} bytes arrived", hint="submit it again"
            )
    raise unknown_reply("submit", reply)
