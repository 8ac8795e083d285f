"""Submit: finished groups on their way from a worker into the pools (`submit.lua`).

A group is checked and encoded, its bytes are uploaded, and the script moves it. Several groups
share one round trip, but each has its own script call, so one refused group does not hold up others
(I2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from buffer.errors import PayloadMissing, WireError
from buffer.groups.claim import fenced
from buffer.groups.order_policy import OrderFunction, submit_argument
from buffer.ids import TEACH
from buffer.job import Job, PayloadRef, Result
from buffer.limits import RunLimits
from buffer.redis.payloads import PayloadStore, SetCommand, pin_listed
from buffer.redis.scripts import ScriptCall, Upload, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import GROUP_TIME, RolloutGroup
from buffer.wire.rollout import Status
from buffer.wire.teacher_columns import sampled_crc

GROUPS_PER_TRIP = 32  # bounds what is sent again after a lost connection


@dataclass(frozen=True, slots=True)
class Stored:
    """A submitted group, not kept if filtered. `arrival`: its number in its task, by arrival."""

    status: Status
    arrival: int


class _Uploads:
    """Makes each upload once, while the server receives the ones before."""

    def __init__(self, making: Iterator[Upload | Exception]) -> None:
        self._making = making
        self.made: list[Upload | Exception] = []

    def __iter__(self) -> Iterator[Upload]:
        yield from [upload for upload in self.made if not isinstance(upload, Exception)]
        for upload in self._making:
            self.made.append(upload)
            if not isinstance(upload, Exception):
                yield upload


SubmitOutcome = Stored | Exception
"""The result for one submitted group.

An exception is that group's own, and nothing of it was changed: `Fenced` (the lease was lost),
`PayloadMissing` (its bytes did not arrive), `WireError` (it cannot be encoded, or is no result), or
an error of the order policy.
"""


class Submission:
    """Submits results of one worker; see `ReplayBuffer.submit_many`."""

    def __init__(
        self,
        context: RunContext,
        payloads: PayloadStore,
        order_function: OrderFunction | None,
    ) -> None:
        self._store, self._keys, self._limits = context
        self._payloads = payloads
        self._order_function = order_function

    def submit(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit results; return their outcomes. After StoreUnavailable, submit again (I13)."""
        return [
            outcome
            for start in range(0, len(results), GROUPS_PER_TRIP)
            for outcome in self._round_trip(worker, results[start : start + GROUPS_PER_TRIP])
        ]

    def _round_trip(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        uploads = _Uploads(self._prepare(worker, result) for result in results)
        replies = iter(self._store.upload_and_call("submit", self._keys.leases, uploads))
        pin_listed(self._store, self._keys)
        return [
            upload if isinstance(upload, Exception) else _outcome(result, next(replies))
            for result, upload in zip(results, uploads.made, strict=True)
        ]

    def _prepare(self, worker: str, result: Result) -> Upload | Exception:
        """Return what stores and submits a group, or why it cannot be submitted.

        All checks are here, before the upload: later ones only protect the trainer from bytes that
        were damaged on their way.
        """
        try:
            if result.group.status not in (Status.COMPLETED, Status.ABORTED):
                raise WireError(
                    f"group {result.group.gid} is {result.group.status}",
                    hint="only completed or aborted groups are submitted",
                )
            if result.job.teacher and result.group.status is not Status.COMPLETED:
                raise WireError(f"a teacher gave back group {result.group.gid} unfinished")
            ref, commands = to_store(self._payloads, result.job, result.group)
            return commands, self.call(worker, result, ref)
        except Exception as error:  # an order policy is a user's code and may raise anything
            return error

    def call(self, worker: str, result: Result, ref: PayloadRef) -> ScriptCall:
        """Return the call of `submit.lua` for a result whose bytes are stored at `ref`."""
        keys = self._keys
        group = result.group
        task = group.task
        status = _final_status(result)
        # of a config that is newer than the run's limits, there may be others
        lanes = self._limits.tasks[task].lanes
        teachers = [name for name in result.teachers if TEACH + name in lanes]
        scores = group.scores.tolist() if status is not Status.ABORTED else ()
        counted = [score for score in scores if math.isfinite(score)]
        arguments = described(group, status, ref, self._limits, self._order_function) | {
            "gid": group.gid,
            "task": task,
            "token": ref.token,
            "tokens": result.new_tokens,
            "length": sum(group.lengths.tolist()),
            "reward_sum": f"{math.fsum(counted):.6g}",
            "reward_count": len(counted),
            "unparsed": group.unparsed,
            "truncated": int(group.truncated.sum()),
            "ms": int(1000 * float(group.shared.extra.get(GROUP_TIME) or 0.0)),
            "patience": self._limits.of(task).max_consecutive_filtered or "",
            "teachers": ",".join(teachers),
            "sampled": sampled_crc(group) if teachers or result.job.teacher else "",
        }
        return ScriptCall(
            keys.slots(task=task, worker=worker),
            arguments,
            keys.in_slot(keys.payload_chunks(ref.gid, ref.token, ref.chunks)),
            group.made_by(arguments["token_lead"] != ""),
        )


def to_store(
    payloads: PayloadStore, job: Job, group: RolloutGroup
) -> tuple[PayloadRef, list[SetCommand]]:
    """Return where a claim stores its group, and the commands. Raises WireError, GroupChanged."""
    data = group_bytes.pieces_checked(group)
    made = payloads.commands(job.gid, job.token, data, group.signatures)
    # after the checksum: wrong bytes must not have a right one
    group.check_unchanged()
    return made


def described(
    group: RolloutGroup,
    status: Status,
    ref: PayloadRef,
    limits: RunLimits,
    order_function: OrderFunction | None,
) -> dict[str, str | int]:
    """Return the arguments that describe a group of this status and its bytes to a script."""
    order = ""  # no place in the index: evaluations are taken whole
    if status is Status.COMPLETED and limits.tasks[group.task].eval_of is None:
        order = submit_argument(limits.order, group, order_function)
    return {
        "status": status.value,
        "samples": len(group),
        "size": ref.size,
        "crc": ref.crc,
        "chunks": ref.chunks,
        "order": order,
        "token_lead": limits.token_lead(group.task),
    }


def _final_status(result: Result) -> Status:
    if result.group.status is Status.COMPLETED and result.filtered:
        return Status.FILTERED
    return result.group.status


def _outcome(result: Result, reply: Sequence[str]) -> SubmitOutcome:
    job = result.job
    match reply:
        case ["OK", arrival]:
            return Stored(_final_status(result), int(arrival))
        case ["FENCED"]:
            return fenced(job)
        case ["CHANGED"]:
            return WireError(
                f"group {job.gid}: teacher {job.teacher} changed more than its own columns",
                hint="a teacher adds teacher_logprobs and the like, and leaves all else as it was",
            )
        case ["MISSING", size]:
            return PayloadMissing(
                f"group {job.gid}: only {size} bytes arrived", hint="submit it again"
            )
    raise unknown_reply("submit", reply)
