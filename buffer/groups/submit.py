"""What workers hand in: finished groups on their way into the pools (`submit.lua`).

Several groups travel together, each with its bytes and a script call of its own: one that was
fenced (I2) does not hold up the others. All are checked here, before the upload: later checks only
protect the trainer from bytes that were damaged on their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from buffer.errors import Fenced, PayloadMissing, RolloutMQError, ScriptError, WireError
from buffer.model import wire
from buffer.model.group import RolloutGroup
from buffer.model.job import Job, PayloadRef, Result
from buffer.model.limits import RunLimits
from buffer.model.order_policy import OrderFunction, submit_argument
from buffer.model.rollout import Status
from buffer.store.keys import Keys
from buffer.store.payloads import PayloadStore, pin_listed
from buffer.store.script_calls import ScriptCall, Upload
from buffer.store.store import Store

_AT_ONCE = 32
"""Groups that travel together: what is repeated if the server goes away meanwhile."""


class HandIn:
    """See `ReplayBuffer.submit_many`."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        limits: RunLimits,
        payloads: PayloadStore,
        function: OrderFunction | None,
    ) -> None:
        """`function`: the run's order policy where it is a user's."""
        self._store = store
        self._keys = keys
        self._limits = limits
        self._payloads = payloads
        self._function = function

    def submit(self, worker: str, results: Sequence[Result]) -> None:
        """Raises Fenced or PayloadMissing for the first group that was refused, once all were
        handed in.
        """
        refused: list[RolloutMQError] = []
        for start in range(0, len(results), _AT_ONCE):
            some = results[start : start + _AT_ONCE]
            replies = self._store.upload_and_call(
                "submit", self._keys.leases, self._uploads(worker, some)
            )
            pin_listed(self._store, self._keys)
            refused += [
                _refusal(r.job, reply)
                for r, reply in zip(some, replies, strict=True)
                if reply[0] != "OK"
            ]
        if refused:
            raise refused[0]

    def _uploads(self, worker: str, results: Sequence[Result]) -> Iterator[Upload]:
        for result in results:
            _check(result.group)
            data = wire.encode_checked(result.group)
            ref, commands = self._payloads.commands(result.job.gid, result.job.token, data)
            yield commands, self.call(worker, result, ref)

    def call(self, worker: str, result: Result, ref: PayloadRef) -> ScriptCall:
        """What `submit.lua` is told of a result whose bytes are behind `ref`."""
        keys = self._keys
        group = result.group
        task = result.group.task
        return ScriptCall(
            keys.slots(task=task, worker=worker),
            self._arguments(result, ref),
            keys.in_slot(keys.payload_chunks(ref.gid, ref.token, ref.chunks)),
            group.made_by(self._limits.token_lag(task) != ""),
        )

    def _arguments(self, result: Result, ref: PayloadRef) -> dict[str, str | int]:
        group = result.group
        status = result.group.status
        if status is Status.COMPLETED and result.filtered:
            status = Status.FILTERED
        scores = group.scores
        counted = scores[np.isfinite(scores)] if status is not Status.ABORTED else scores[:0]
        return {
            "gid": group.gid,
            "token": ref.token,
            "status": status.value,
            "samples": len(group),
            "tokens": result.new_tokens,
            "size": ref.size,
            "crc": ref.crc,
            "reward_sum": f"{float(counted.sum()):.6g}",
            "reward_count": len(counted),
            "order": self._turn(group) if status is Status.COMPLETED else "",
            "lag": self._limits.token_lag(group.task),
            "chunks": ref.chunks,
        }

    def _turn(self, group: RolloutGroup) -> str:
        # evaluations are taken whole: their order does not matter
        is_eval = self._limits.tasks[group.task].eval_of is not None
        return "" if is_eval else submit_argument(self._limits.order, group, self._function)


def _check(group: RolloutGroup) -> None:
    if group.status not in (Status.COMPLETED, Status.ABORTED):
        raise WireError(
            f"group {group.gid} is {group.status}",
            hint="only completed or aborted groups are submitted",
        )


def _refusal(job: Job, reply: Sequence[str]) -> RolloutMQError:
    match reply[0]:
        case "FENCED":
            return Fenced(
                f"group {job.gid}: the lease of token {job.token[:8]}… is gone; its result is not wanted"
            )
        case "MISSING":
            return PayloadMissing(
                f"group {job.gid}: only {reply[1]} bytes arrived", hint="submit it again"
            )
    return ScriptError(f"submit: {reply}")
