"""The job queue: prompts become jobs, jobs become leases, leases expire.

The stream *is* the queue: `claim` reads its head, deletes the entry and grants the lease in one
script, so `XLEN` is the backlog, and no second record of ownership exists that could drift.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

from buffer.failure_text import cause_of, cut_text, headline
from buffer.groups.claim import Claim, Enqueued, Reaped, fenced, stage_before
from buffer.groups.skips import skip_letter
from buffer.ids import LANES, group_id, new_nonce, split_group_id
from buffer.job import EndedEarly, Job, ReleaseKind, SampledTokens
from buffer.limits import RunLimits
from buffer.redis.bounds import GROUPS_PER_CALL, KEYS_PER_TRIP
from buffer.redis.key_fields import read_counts
from buffer.redis.retry import SYSTEM_RANDOM
from buffer.redis.scripts import unfenced, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import ages


@dataclass(frozen=True, slots=True)
class Serves:
    """The tasks and lanes that a worker of a mixed fleet claims from."""

    tasks: frozenset[str]
    lanes: frozenset[str] = frozenset(LANES)

    def __contains__(self, queue: tuple[str, str]) -> bool:
        task, lane = queue
        return task in self.tasks and lane in self.lanes


def serving_order(
    limits: RunLimits, serves: Serves | None = None, held: Mapping[str, int] | None = None
) -> list[tuple[str, str]]:
    """Return the queues that a claim reads, as (task, lane), first to last.

    Evaluations come first, then groups that were begun, then new ones. Among tasks, the one of
    which the worker holds least for its weight comes first (`held`: groups by task), so that a slow
    task does not fill the worker. Ties are drawn by weight, anew for every claim.
    """
    weights = limits.newest_weights()
    held_groups = held or {}

    def sort_key(task: str) -> tuple[float, float]:
        weight = weights[task]
        if not weight:
            # its remaining jobs are of an earlier task mix, and needed before all others
            return -1.0, 0.0
        # the keys of weighted sampling without replacement (Efraimidis and Spirakis, 2006)
        drawn = SYSTEM_RANDOM.random() ** (1.0 / weight)
        return held_groups.get(task, 0) / weight, -drawn

    queues = [(task, "eval") for task in limits.eval_tasks]
    for lane in ("resume", "fresh"):
        queues += [(task, lane) for task in sorted(weights, key=sort_key)]
    return [queue for queue in queues if serves is None or queue in serves]


_MESSAGE = 150  # characters of a reason on screens


class JobQueue:
    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, self._limits, self._observers = context

    # -- for the producer ----------------------------------------------------

    def cursor(self, task: str) -> int:
        """Return the next draw of a task (I3)."""
        cursor = self._store.ask("cursor", "HGET", self._keys.cursors, task)
        return read_counts(self._keys.cursors, [task], [cursor])[0]

    def next_draw(self, nonce: str, task: str) -> int:
        """Return the cursor, moved past draws that are in the run already. Raises Fenced.

        After a loss of server data, workers may have submitted such draws again before it.
        """
        while True:
            reply = self._store.call(
                "pass_over",
                self._keys.slots(task=task),
                {"nonce": nonce, "task": task, "limit": KEYS_PER_TRIP},
            )
            _, cursor, may_be_known = unfenced(reply, "producer")
            if not int(may_be_known):
                return int(cursor)

    def enqueue(
        self,
        nonce: str,
        operation: str,
        task: str,
        cursor: int,
        samples: Sequence[int],
        target: int | None,
        letters: Mapping[int, str] = MappingProxyType({}),
    ) -> Enqueued:
        """Enqueue draws from the cursor on, as far as there is room, and move the cursor with them.

        `samples`: rollouts of each draw, 0 for an unusable draw; their INIT payloads must be
        stored. `letters`: `skip_letter` by skipped draw. `operation` is the same for a repeated
        call. Raises Fenced when another producer was opened, PayloadMissing for a draw without a
        prompt.
        """
        began_ns = time.time_ns()
        keys = self._keys
        limits = self._limits
        lane = limits.tasks[task].lane
        payloads = [keys.payload(group_id(task, cursor + i), "init") for i in range(len(samples))]
        reply = self._store.call(
            "enqueue",
            keys.slots(task=task),
            {
                "nonce": nonce,
                "operation": operation,
                "task": task,
                "lane": lane,
                "cursor": cursor,
                "target": target,
                "threshold": limits.threshold(task),
                "byte_limit": limits.low_bytes if lane == "fresh" else limits.high_bytes,
                "max_in_flight": limits.setting(task, "max_in_flight"),
                "most_skipped": limits.most_skipped(task),
            },
            payloads,
            [{"samples": n, "letter": letters.get(d, "")} for d, n in enumerate(samples, cursor)],
        )
        done = Enqueued.parse(unfenced(reply, "producer"), cursor)
        passed = zip(range(cursor, done.cursor), samples, strict=False)
        started = {group_id(task, draw): count for draw, count in passed if count and done.count}
        for observer in self._observers:
            observer.enqueued(started, began_ns)
        return done

    def reissue(
        self,
        nonce: str,
        task: str,
        status: str,
        target: int | None,
        *,
        at_least: int = 1,
        tail_step: int | None = None,
        limit: int = 256,
    ) -> int:
        """Put groups of the aborted or expired pool back into a queue; return how many.

        Moves none if there are fewer than `at_least`, or above the high mark (I12). `tail_step` is
        recorded with them: the last train step of the tail batch that they begin. Raises Fenced.
        """
        reply = self._store.call(
            "reissue",
            self._keys.slots(task=task, status=status),
            {
                "nonce": nonce,
                "target": target,
                "threshold": self._limits.threshold(task),
                "lane": "resume" if self._limits.tasks[task].eval_of is None else "eval",
                "at_least": at_least,
                "tail_step": tail_step,
                "limit": limit,
                "byte_limit": self._limits.high_bytes,
                "max_in_flight": self._limits.setting(task, "max_in_flight"),
            },
        )
        match unfenced(reply, "producer"):
            case ["OK", count, _]:
                return int(count)
            case ["CLOSED" | "FULL" | "STOPPED", *_]:
                return 0
        raise unknown_reply("reissue", reply)

    def resume_task(self, task: str) -> None:
        self._store.call("resume_task", self._keys.slots(task=task), {"task": task})

    # -- for workers ---------------------------------------------------------

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
        """Claim up to `limit` jobs (at most 100) in `serving_order`, beside those `held`.

        The same `token` repeats a claim whose reply was lost (I13). `weights`: what the engine has.
        """
        keys = self._keys
        limits = self._limits
        queues = serving_order(limits, serves, Counter(job.task for job in held))
        for observer in self._observers:
            observer.claiming(queues, limit)
        began_ns = time.time_ns()
        reply = self._store.call(
            "claim",
            keys.slots(worker=worker),
            {
                "worker": worker,
                "nonce": nonce,
                "token": token,
                "weights": str(weights),
                "lease_ms": limits.lease_ms,
                "limit": min(limit, GROUPS_PER_CALL),
                "low_bytes": limits.low_bytes,
                "high_bytes": limits.high_bytes,
            },
            [keys.slots(task=task, lane=lane) for task, lane in queues],
            [lane for _, lane in queues],
        )
        claim = Claim.parse(reply, token)
        for observer in self._observers:
            observer.claimed(worker, weights, claim.jobs, began_ns)
        return claim

    def release(
        self,
        worker: str,
        job: Job,
        kind: ReleaseKind,
        reason: str = "",
        ended: EndedEarly | None = None,
        record: Mapping[str, Any] | None = None,
        sampled: SampledTokens | None = None,
    ) -> str:
        """Release a group without a result; return its stage. Raises Fenced for a lost lease.

        `reason`: text of a failure (`buffer.failure_text`). `record`: `extra` of a skipped group.
        """
        began_ns = time.time_ns()
        task = job.task
        text = cut_text(reason)
        letter = orjson.dumps({"reason": text, "worker": worker, "try": job.tries}).decode()
        if kind == "skipped":
            letter = skip_letter(job.gid, text, record or {}, worker)
        patience, first = self._limits.failures_in_row(task)
        reply = self._store.call(
            "release",
            self._keys.slots(task=task, worker=worker),
            {
                "gid": job.gid,
                "token": job.token,
                "kind": kind,
                "reason": letter,
                "max_tries": self._limits.max_tries,
                "tail_batch_max_tries": self._limits.tail_tries(task),
                "token_lead": self._limits.token_lead(task),
                "threshold": self._limits.threshold(task),
                "retryable": int(self._limits.retries_expired(task)),
                "discarded": ended.tokens if ended else 0,
                "unmade": ended.unmade_tokens if ended else 0,
                "task": task,
                "worker": worker,
                "lease_ms": self._limits.lease_ms,
                "message": headline(text, _MESSAGE),
                "cause": cause_of(text),
                "patience": patience,
                "first": first,
                "sampled": sampled.text() if sampled else None,
                "made_by": ages({"oldest": ended.oldest}) if ended else "",
                "most_skipped": self._limits.most_skipped(task),
            },
        )
        match reply:
            case ["OK", stage]:
                for observer in self._observers:
                    observer.released(worker, job, kind, reason, began_ns)
                return str(stage)
            case ["FENCED"]:
                raise fenced(job)
        raise unknown_reply("release", reply)

    # -- for operators -------------------------------------------------------

    def requeue(self, gid: str, *, operation: str = "") -> str:
        """Put a dead or pooled group back into a queue with all its tries; return where it was.

        "waiting": nothing had to be done. The group starts from its prompt; an aborted one keeps
        its tokens. `operation` is the same for a repeated call. Raises GroupHeld when the group
        runs, is in a batch, has ended, or never was.
        """
        task, _ = split_group_id(gid)
        lane = "resume" if self._limits.tasks[task].eval_of is None else "eval"
        reply = self._store.call(
            "requeue",
            self._keys.slots(gid=gid, task=task),
            {
                "gid": gid,
                "operation": operation or new_nonce(),
                "task": task,
                "lane": lane,
            },
            durable=True,
        )
        return stage_before(reply, gid)

    def drop(self, gid: str, *, revoke: str = "", sampled: SampledTokens | None = None) -> str:
        """End a group that waits, is in a pool, or is dead; return where it was.

        "dropped": nothing had to be done. A running group is only dropped if `revoke` names
        its worker: the lease ends in the same step; `sampled`: what that worker counted. Raises
        GroupHeld otherwise, and when the group is in a batch, has ended in another way, or never
        was.
        """
        task, draw = split_group_id(gid)
        reply = self._store.call(
            "drop",
            self._keys.slots(gid=gid, task=task),
            {
                "gid": gid,
                "draw": draw,
                "revoke": revoke,
                "sampled": sampled.text() if sampled else None,
            },
            durable=True,
        )
        return stage_before(reply, gid)

    # -- for all processes ---------------------------------------------------

    def expire_waiting(self, task: str, limit: int = GROUPS_PER_CALL) -> int:
        """Dequeue up to `limit` waiting groups whose tokens became too old; return how many."""
        keys = self._keys.slots(task=task)
        keys["pool"] = self._keys.age(task)
        moved = running = 0
        read = limit
        while read == limit and moved < limit:
            _, some, others = self._store.call(
                "expire",
                keys,
                {
                    "task": task,
                    "threshold": self._limits.threshold(task),
                    "retryable": int(self._limits.retries_expired(task)),
                    "passed": running,
                    "limit": limit,
                },
            )
            moved += int(some)
            running += int(others)
            read = int(some) + int(others)
        return moved

    def reap(self, limit: int = GROUPS_PER_CALL) -> Reaped:
        """Take back up to `limit` groups of expired leases, and forget long gone workers."""
        limits = self._limits
        reply = self._store.call(
            "reap",
            self._keys.slots(),
            {
                "worker": "",
                "lease_ms": limits.lease_ms,
                "limit": limit,
                "max_tries": limits.max_tries,
                "worker_timeout_ms": limits.worker_timeout_ms,
            },
        )
        return Reaped.parse(reply)
