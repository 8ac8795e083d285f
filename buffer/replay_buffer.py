"""Finished groups, by task and status: what workers submit and trainers take.

A pool is a sorted set scored by the oldest policy version in the group, its members ordered by arrival: the
stalest first, then first come first served. Being too old is a range of scores, never a scan (I8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from buffer import wire
from buffer.errors import Fenced, PayloadMissing, WireError
from buffer.group import RolloutGroup
from buffer.job import Job
from buffer.keys import POOLS, Keys
from buffer.limits import RunLimits
from buffer.order import OrderFunction, submit_argument
from buffer.order_index import expire
from buffer.payloads import PayloadRef, PayloadStore
from buffer.rollout import Status
from buffer.store import Store

SubmitStatus = Literal["completed", "aborted", "filtered"]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Groups of one task that are ready, aborted and expired."""

    completed: int
    aborted: int
    expired: int


class ReplayBuffer:
    """The pools of one run."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, payloads: PayloadStore) -> None:
        self._store, self._keys, self._limits, self._payloads = store, keys, limits, payloads
        self.order_function: OrderFunction | None = None
        """the run's order policy where it is a user's: loaded and set by whoever submits"""

    def get(self, ref: PayloadRef) -> RolloutGroup:
        """The group behind a payload. Raises PayloadMissing or WireError."""
        group = wire.decode(self._payloads.read(ref))
        if group.gid != ref.gid:
            raise WireError(f"the payload of {ref.gid} says that it is {group.gid!r}")
        return group

    def submit(self, worker: str, job: Job, group: RolloutGroup, new_tokens: int, *, filtered: bool = False) -> None:
        """Hand in a completed, aborted or filtered group.

        `new_tokens`: generated since the claim. Checked here, before the upload: later checks only protect the
        trainer from bytes that were damaged on their way. Raises Fenced when the lease was lost meanwhile.
        """
        status = self._submittable(group, filtered)
        data = wire.encode(group)
        wire.decode(data)
        ref = self._payloads.write(job.gid, job.token, data)
        reply = self._submit(worker, group, ref, status, new_tokens)
        if reply[0] == "MISSING":
            self._payloads.write(job.gid, job.token, data)
            reply = self._submit(worker, group, ref, status, new_tokens)
        if reply[0] == "FENCED":
            raise Fenced(f"group {job.gid}: the lease of token {job.token[:8]}… is gone; its result is not wanted")
        if reply[0] == "MISSING":
            raise PayloadMissing(f"group {job.gid}: {reply[1]} of {ref.size} bytes arrived")

    def _submittable(self, group: RolloutGroup, filtered: bool) -> SubmitStatus:
        status = group.status
        if status is Status.ABORTED:
            return "aborted"
        if status is not Status.COMPLETED:
            raise WireError(f"group {group.gid} is {status}", hint="only completed or aborted groups are submitted")
        return "filtered" if filtered else "completed"

    def _submit(
        self, worker: str, group: RolloutGroup, ref: PayloadRef, status: SubmitStatus, new_tokens: int
    ) -> list[str]:
        keys, task = self._keys, group.task
        scores = group.scores[np.isfinite(group.scores)]
        counted = status != "aborted"
        return self._store.call(
            "submit",
            {
                "leases": keys.leases,
                "holds": keys.holds(worker),
                "groups": keys.groups,
                "progress": keys.progress(task),
                "completed": keys.pool(task, "completed"),
                "aborted": keys.pool(task, "aborted"),
                "filtered": keys.ended(task, "filtered"),
                "lineages": keys.lineages,
                "garbage": keys.garbage,
                "bell_trainer": keys.bell("trainer"),
                "bell_producer": keys.bell("producer"),
                "events": keys.events,
                "order": keys.order(task),
            },
            {
                "gid": group.gid,
                "token": ref.token,
                "status": status,
                "samples": len(group),
                "tokens": new_tokens,
                "size": ref.size,
                "crc": ref.crc,
                "reward_sum": f"{float(scores.sum()) if counted else 0.0:.6g}",
                "reward_count": len(scores) if counted else 0,
                "order": self._place(group) if status == "completed" else "",
            },
            keys.payload_chunks(ref.gid, ref.token, ref.chunks),
            [part for pair in group.oldest_by_lineage().items() for part in pair],
            durable=True,
        )

    def _place(self, group: RolloutGroup) -> str:
        # evaluations are taken whole: their order does not matter
        is_eval = self._limits.tasks[group.task].eval_of is not None
        return "" if is_eval else submit_argument(self._limits.order, group, self.order_function)

    def count(self, task: str) -> PoolSizes:
        """How many groups each pool of a task holds. O(1)."""
        pipe = self._store.control.pipeline(transaction=False)
        for status in POOLS:
            pipe.zcard(self._keys.pool(task, status))
        return PoolSizes(*self._store.retrying("count", pipe.execute))

    def refresh(self, task: str, *, limit: int = 500) -> int:
        """Expire what the next train step may not use any more; returns how many groups moved."""
        moved = 0
        for status in ("completed", "aborted"):
            while (slice_ := expire(self._store, self._keys, self._limits, task, status, limit)) == limit:
                moved += slice_
            moved += slice_
        return moved
