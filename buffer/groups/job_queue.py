"""The waiting line: prompts become jobs, jobs become leases, leases run out.

The stream *is* the line: `claim` reads its head in order of lane, deletes the entry and grants the
lease in one script, so `XLEN` is the backlog, and no second record of ownership exists that could
drift.

In which order a claim looks at the waiting lines, and which of them it leaves to other workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import orjson

from buffer.errors import Fenced, GroupHeld, PayloadMissing, ScriptError
from buffer.groups.claim import Claim, Enqueued, Reaped
from buffer.model.ids import LANES, group_id, new_nonce, split_group_id
from buffer.model.job import Job, ReleaseKind
from buffer.model.limits import RunLimits
from buffer.model.rollout import PolicyVersion
from buffer.store.keys import Keys
from buffer.store.payloads import pin_listed
from buffer.store.replies import unfenced
from buffer.store.retry import CHANCE
from buffer.store.store import Store


@dataclass(frozen=True, slots=True)
class Serves:
    """What a worker of a mixed fleet takes: some tasks, some lanes."""

    tasks: frozenset[str]
    lanes: frozenset[str] = frozenset(LANES)

    def __contains__(self, line: tuple[str, str]) -> bool:
        """Whether it takes jobs of (task, lane)."""
        return line[0] in self.tasks and line[1] in self.lanes


def serving_order(
    limits: RunLimits, serves: Serves | None = None, held: Mapping[str, int] | None = None
) -> list[tuple[str, str]]:
    """(task, lane), first to last: evaluations, then groups that were begun, then new ones.

    Among tasks, the one of which the worker has `held` least for its weight is first, so that a
    slow one does not fill the worker; where they are even, they are drawn by weight, anew for every
    claim.
    """
    weights = limits.newest_weights()
    has = held or {}

    def turn(task: str) -> tuple[float, float]:
        if not (weight := weights[task]):
            # what still waits of it is of an earlier mix, and needed before all others
            return -1.0, 0.0
        return has.get(task, 0) / weight, -(CHANCE.random() ** (1.0 / weight))

    evals = [(task, "eval") for task in limits.eval_tasks]
    lines = evals + [
        (task, lane) for lane in ("resume", "fresh") for task in sorted(weights, key=turn)
    ]
    return [line for line in lines if serves is None or line in serves]


CLAIM_MOST = 128
"""Jobs in one claim: the server is busy for some milliseconds, and others shall get some, too."""


class JobQueue:
    """Jobs of one run."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    # -- the producer's side -------------------------------------------------

    def cursor(self, task: str) -> int:
        """The next draw of a task (I3)."""
        cursor = self._store.retrying(
            "cursor", lambda: self._store.control.hget(self._keys.cursors, task)
        )
        return int(cursor or 0)

    def next_draw(self, nonce: str, task: str) -> int:
        """The cursor, once it has passed over what came in before it did (after a loss). Raises
        Fenced.
        """
        while True:
            reply = self._store.call(
                "pass_over",
                self._keys.slots(task=task),
                {"nonce": nonce, "task": task, "limit": 500},
            )
            if not int(unfenced(reply, "producer")[2]):
                return int(reply[1])

    def enqueue(
        self,
        nonce: str,
        operation: str,
        task: str,
        cursor: int,
        samples: Sequence[int],
        target: int | None,
    ) -> Enqueued:
        """Start the draws cursor, cursor+1, …, as many as there is room for, and move the cursor
        with them.

        `samples`: rollouts of each draw, 0 for one that cannot be used. Their INIT payloads must be
        stored. `operation` is the same for a repeated call. Raises Fenced when another producer was
        opened.
        """
        keys = self._keys
        limits = self._limits
        lane = limits.tasks[task].lane
        payloads = [keys.payload(group_id(task, cursor + i), "init") for i in range(len(samples))]
        # in a cluster no script can see them
        sizes = self._store.each("prompts", [("STRLEN", name) for name in payloads if keys.spread])
        reply = self._store.call(
            "enqueue",
            keys.slots(task=task),
            {
                "nonce": nonce,
                "operation": operation,
                "task": task,
                "lane": lane,
                "cursor": cursor,
                "target": "" if target is None else target,
                "threshold": self._limits.threshold(task),
                "mark": limits.low_bytes if lane == "fresh" else limits.high_bytes,
                **self._bounds(task),
            },
            keys.in_slot(payloads),
            [part for pair in zip_longest(samples, sizes, fillvalue=0) for part in pair],
        )
        pin_listed(self._store, keys)
        return self._enqueued(unfenced(reply, "producer"), task, cursor)

    def _enqueued(self, reply: list[str], task: str, cursor: int) -> Enqueued:
        match reply[0]:
            case "OK":
                return Enqueued(int(reply[1]), int(reply[2]))
            case "CURSOR":
                return Enqueued(0, int(reply[1]))
            case "CLOSED" | "FULL" | "STOPPED":
                return Enqueued(0, cursor, refusal=reply[0])
            case "NO_PAYLOAD":
                raise PayloadMissing(
                    f"the prompt of {reply[1]} is not stored", hint="write it, then enqueue again"
                )
        raise ScriptError(f"enqueue: {reply}")

    def reissue(
        self,
        nonce: str,
        task: str,
        status: str,
        target: int | None,
        *,
        at_least: int = 1,
        limit: int = 256,
    ) -> int:
        """Let groups of a pool (aborted, expired) wait again, within the room. Returns how many:
        none above the high mark (I12).
        """
        reply = self._store.call(
            "reissue",
            self._keys.slots(task=task, status=status),
            {
                "nonce": nonce,
                "target": "" if target is None else target,
                "threshold": self._limits.threshold(task),
                "lane": "resume" if self._limits.tasks[task].eval_of is None else "eval",
                "at_least": at_least,
                "limit": limit,
                "mark": self._limits.high_bytes,
                **self._bounds(task),
            },
        )
        return int(reply[1]) if unfenced(reply, "producer")[0] == "OK" else 0

    def _bounds(self, task: str) -> dict[str, int | str]:
        own = self._limits.of(task)
        return {"most": own.max_in_flight or "", "patience": own.max_consecutive_failures or ""}

    def failures(self, task: str) -> tuple[int, bool]:
        """(tries that failed or were filtered one after the other, whether that stopped the task)."""
        key = self._keys.progress(task)
        raw = self._store.retrying(
            "failures", lambda: self._store.control.hget(key, "failures_in_row")
        )
        return int(raw or 0), self._limits.is_too_many_failures(task, int(raw or 0))

    def forgive(self, task: str) -> None:
        """Forget the failures of a task, so that it is started again."""
        self._store.call("forgive", self._keys.slots(task=task), {"task": task})

    # -- the worker's side ---------------------------------------------------

    def claim(
        self,
        worker: str,
        nonce: str,
        token: str,
        weights: PolicyVersion,
        limit: int,
        serves: Serves | None = None,
        held: Sequence[Job] = (),
    ) -> Claim:
        """Up to `limit` jobs (CLAIM_MOST at most) for a worker that has `held` already, in
        `serving_order`. The same `token` repeats a claim whose reply was lost.
        """
        keys = self._keys
        limits = self._limits
        lanes = serving_order(limits, serves, Counter(job.task for job in held))
        reply = self._store.call(
            "claim",
            keys.slots(worker=worker),
            {
                "worker": worker,
                "nonce": nonce,
                "token": token,
                "weights": str(weights),
                "lease_ms": limits.lease_ms,
                "limit": min(limit, CLAIM_MOST),
                "low_bytes": limits.low_bytes,
                "high_bytes": limits.high_bytes,
            },
            [keys.slots(task=task, lane=lane) for task, lane in lanes],
            [lane for _, lane in lanes],
        )
        return Claim.parse(reply, token)

    def release(self, worker: str, job: Job, kind: ReleaseKind, reason: str = "") -> str:
        """Give a group back without a result. Returns its place; Fenced when the lease was lost
        meanwhile.
        """
        task = job.task
        text = reason[:2000].encode(errors="replace").decode()
        letter = orjson.dumps({"reason": text, "worker": worker, "try": job.tries}).decode()
        reply = self._store.call(
            "release",
            self._keys.slots(task=task, worker=worker),
            {
                "gid": job.gid,
                "token": job.token,
                "kind": kind,
                "reason": letter,
                "max_tries": self._limits.max_tries,
                "tail": self._limits.tail_tries(task) or "",
                "lag": self._limits.token_lag(task),
            },
        )
        if reply[0] == "FENCED":
            raise Fenced(f"group {job.gid}: the lease of token {job.token[:8]}… is gone")
        return str(reply[1])

    # -- by hand -------------------------------------------------------------

    def requeue(self, gid: str, *, operation: str = "") -> str:
        """Let a dead or pooled group wait again with all its tries; where it was before ("waiting":
        nothing was to do).

        It starts from its prompt; only an aborted group keeps its tokens. `operation` is the same
        for a repeated call. Raises GroupHeld when it runs, is in a batch, has ended, or never was.
        """
        task, draw = split_group_id(gid)
        lane = "resume" if self._limits.tasks[task].eval_of is None else "eval"
        reply = self._store.call(
            "requeue",
            self._keys.slots(gid=gid, task=task, lane=lane),
            {"gid": gid, "draw": draw, "operation": operation or new_nonce(), "lane": lane},
            durable=True,
        )
        return self._moved(reply, gid)

    def drop(self, gid: str, *, revoke: str = "") -> str:
        """End a group that waits, is in a pool, or is dead; where it was before ("dropped": nothing
        was to do).

        One that runs is only dropped if `revoke` names the worker that holds it: the lease ends in
        the same step. Raises GroupHeld otherwise, and when it is in a batch, has ended as something
        else, or never was.
        """
        task, draw = split_group_id(gid)
        reply = self._store.call(
            "drop",
            self._keys.slots(gid=gid, task=task),
            {"gid": gid, "draw": draw, "revoke": revoke},
            durable=True,
        )
        return self._moved(reply, gid)

    def _moved(self, reply: list[str], gid: str) -> str:
        match reply[0]:
            case "OK":
                return reply[1]
            case "RUNNING":
                raise GroupHeld(
                    f"{gid} runs on {reply[1]}",
                    hint="name that worker to revoke its lease, or fence it",
                )
            case "TAKEN":
                raise GroupHeld(
                    f"{gid} is in batch {reply[1]}",
                    hint="only the trainer can take it out of there",
                )
            case "ENDED":
                raise GroupHeld(f"{gid} has ended: it is {reply[1]}")
            case "UNKNOWN":
                raise GroupHeld(f"{gid} was never started", hint="see rolloutmq ls")
        raise ScriptError(f"{gid}: {reply}")

    # -- anybody's -----------------------------------------------------------

    def reap(self, limit: int = 100) -> Reaped:
        """Take back up to `limit` groups that silent workers held, and forget workers that are long
        gone.
        """
        limits = self._limits
        reply = self._store.call(
            "reap",
            self._keys.slots(),
            {
                "lease_ms": limits.lease_ms,
                "limit": limit,
                "max_tries": limits.max_tries,
                "worker_timeout_ms": limits.worker_timeout_ms,
            },
        )
        if reply[0] == "GRACE":
            return Reaped(grace_ms=int(reply[1]))
        return Reaped(*map(int, reply[1:]))
