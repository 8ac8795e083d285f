"""The pools of a run: finished groups by task and status, as a trainer's replay buffer.

A pool is a sorted set scored by the oldest policy version in the group, its members ordered by
arrival. Too stale groups are a range of scores, which is neither counted nor returned, also if
expiry has not run yet (I8). Scripts never search without a bound: where too many stale groups stand
before the fresh ones, they change nothing and report it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from buffer.errors import ConfigError, GroupHeld, PayloadMissing, WireError
from buffer.groups.claim import has_ended, never_started
from buffer.groups.kept_turns import KeptTurns
from buffer.groups.put_groups import GroupPut, arguments_of, stamped
from buffer.groups.submit import Stored, Submission, SubmitOutcome
from buffer.ids import IMPORTED_FROM, POOLS, group_id, new_nonce, split_group_id
from buffer.job import Job, PayloadRef, Result, SampledTokens
from buffer.manifest import Manifest, ManifestEntry
from buffer.redis.bounds import GROUPS_PER_CALL
from buffer.redis.payloads import PayloadStore, Whole
from buffer.redis.scripts import unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status
from buffer.wire.staleness import AgeLimit, next_step

AGING = ("completed", "aborted")  # the pools whose groups become too stale

PoolStatus = Literal["completed", "aborted", "expired"]

MAX_READ = 1024  # groups that one call reads: as many as a batch may hold


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Counts the groups of one task by pool.

    `completed` and `aborted` count groups that the next train step may use. `stale` ones are in one
    of these pools, but too old: `refresh_staleness` moves them.
    """

    completed: int
    aborted: int
    expired: int
    stale: int


class ReplayBuffer:
    """Finished groups by task and status: what workers submit, others put, and trainers take."""

    def __init__(self, context: RunContext, payloads: PayloadStore) -> None:
        self._context = context
        self._store, self._keys, self._limits, self._observers = context
        self._payloads = payloads

    # -- add and replace -----------------------------------------------------

    def put(
        self,
        task: str,
        groups: Sequence[Sequence[RolloutState]],
        *,
        weights: PolicyVersion | None = None,
        ageless: bool = False,
        retryable: bool | None = None,
    ) -> dict[str, str]:
        """Add groups that no worker holds; return the pool or end of each by its new gid, in order.

        A group goes to the pool of its status, or counts as expired if too stale for the next step.
        Expired and stale members start again if `retryable` (default: as the run does), else the
        group is dropped. Tokens after the last span of a rollout get the version `weights`; without
        it, every rollout needs spans, or the groups are `ageless`: no policy of this run made them.

        All groups are checked before the first is added; the caller's rollouts are not changed.

        Raises:
            WireError: a group is empty, has an INIT, FAILED or FILTERED rollout, or cannot be
                encoded.
            ConfigError: there is no such task.
            MemoryFull: the run holds as many payload bytes as it may.
        """
        intake = GroupPut(self._context, self._payloads, "put")
        copies = [stamped(states, weights, ageless) for states in groups]
        for states in copies:
            intake.check(RolloutGroup(group_id(task, IMPORTED_FROM), task, states))
        retry = self._limits.retries_expired(task) if retryable is None else retryable
        placed: dict[str, str] = {}
        for states in copies:
            make_group = partial(RolloutGroup, task=task, states=states)
            gid, pool = intake.put(task, make_group, retryable=retry)
            placed[gid] = pool
        intake.close()
        return placed

    def update(
        self,
        gid: str,
        states: Sequence[RolloutState],
        *,
        weights: PolicyVersion | None = None,
        ageless: bool = False,
        replaces: str = "",
    ) -> None:
        """Replace the rollouts of a group in a pool, for example to change rewards.

        The group goes to the pool of its new status (completed or aborted) and keeps its place in
        the order. `weights` and `ageless` are those of `put`. `replaces`: the payload token that
        the caller has read (default: the present one).

        Raises:
            GroupHeld: the group is in no pool or has other bytes by now; nothing was changed.
            WireError: the rollouts are no result.
        """
        task = split_group_id(gid)[0]
        group = RolloutGroup(gid, task, stamped(states, weights, ageless))
        if group.status not in (Status.COMPLETED, Status.ABORTED):
            raise WireError(
                f"group {gid} is {group.status}",
                hint="only completed or aborted groups can replace it",
            )
        data = group_bytes.encode_checked(group)
        found = replaces or self._store.ask("update", "HGET", self._keys.group(gid), "payload")
        seen = found.decode() if isinstance(found, bytes) else found or "init"
        match self._update(group, self._payloads.write(gid, new_nonce(), data), seen):
            case ["OK"]:
                return
            case ["CHANGED", token]:
                raise GroupHeld(
                    f"{gid} has changed: its payload is {token[:8]}…, not {seen[:8]}…",
                    hint="read it again",
                )
            case ["NOT_POOLED", stage]:
                raise GroupHeld(f"{gid} is in no pool: it is {stage}")
            case ["ENDED", stage]:
                raise has_ended(gid, stage)
            case ["UNKNOWN"]:
                raise never_started(gid)
            case ["MISSING", size]:
                raise PayloadMissing(
                    f"group {gid}: {size} of {len(data)} bytes arrived", hint="update it again"
                )
            case reply:
                raise unknown_reply("update", reply)

    def _update(self, group: RolloutGroup, ref: PayloadRef, replaces: str) -> list[str]:
        keys = self._keys
        gid = group.gid
        task = group.task
        return self._store.call(
            "update",
            keys.slots(gid=gid, task=task),
            {
                "gid": gid,
                "replaces": replaces,
                "token": ref.token,
                **arguments_of(group, ref, self._limits),
            },
            keys.payload_chunks(gid, ref.token, ref.chunks),
            durable=True,
        )

    def submit(
        self,
        worker: str,
        job: Job,
        group: RolloutGroup,
        new_tokens: int,
        *,
        filtered: bool = False,
        sampled: SampledTokens | None = None,
    ) -> Stored:
        """Submit one group (see `Result`); raise its error."""
        result = Result(job, group, new_tokens, filtered, sampled)
        (outcome,) = self.submit_many(worker, [result])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def submit_many(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        """Submit the groups that a worker finished, in one round trip; return the outcome of each.

        An error concerns one group alone. Raises StoreUnavailable when the server does not answer;
        the same results may then be submitted again (I13).
        """
        began_ns = time.time_ns()
        submission = Submission(self._context, self._payloads)
        outcomes = submission.submit(worker, results)
        for observer in self._observers:
            observer.submitted(worker, results, outcomes, began_ns)
        return outcomes

    def keep_turns(self, job: Job, group: RolloutGroup) -> KeptTurns:
        """Return what keeps the turns of the agents of a claimed group while it runs."""
        return KeptTurns(self._context, self._payloads, job, group)

    # -- read without taking ---------------------------------------------------

    def count(self, task: str, status: PoolStatus = "completed") -> int:
        """Return the size of a pool. O(log N). Raises ConfigError."""
        if status not in POOLS:
            raise ConfigError(f"no pool of {status!r} groups", hint=f"known: {', '.join(POOLS)}")
        count: int = getattr(self.count_statuses(task)[task], status)
        return count

    def count_statuses(self, *tasks: str) -> dict[str, PoolSizes]:
        """Return the pool sizes of these tasks (default: all) at one instant. O(tasks * log N)."""
        names = [self._known(task) for task in (tasks or self._limits.tasks)]
        _, *counts = self._store.call(
            "counts",
            self._keys.slots(),
            {},
            [self._keys.slots(task=task) for task in names],
            [self._limits.threshold(task) for task in names],
        )
        numbers = [int(count) for count in counts]
        return {task: PoolSizes(*numbers[4 * i : 4 * i + 4]) for i, task in enumerate(names)}

    def is_ready(self, counts: Mapping[str, int]) -> bool:
        """Return whether each task has N ready groups; for display only. O(tasks * log N)."""
        wanted = {task: count for task, count in counts.items() if count > 0}
        if not wanted:
            return True
        sizes = self.count_statuses(*wanted)
        return all(sizes[task].completed >= count for task, count in wanted.items())

    def get(self, count: int, task: str, status: PoolStatus = "completed") -> list[RolloutGroup]:
        """Return the first `count` groups of a pool (at most 1,024) without removing them.

        Completed groups come in the order of the run's policy (by age, until the trainer has
        rebuilt the index for a changed policy), others oldest first, as `reissue` finds them. A
        group that leaves the pool while its bytes are read is left out.
        """
        if count <= 0:
            return []
        if count > MAX_READ:
            raise ConfigError(
                f"{count} groups in one call", hint=f"at most {MAX_READ}: use groups.find for more"
            )
        refs = [entry.payload for entry in self.peek(count, task, status)]
        try:
            return self.read_many(refs)
        except PayloadMissing:
            found = []
            for ref in refs:
                try:
                    found.append(self.read(ref))
                except PayloadMissing:
                    token = self._store.ask("get", "HGET", self._keys.group(ref.gid), "payload")
                    if token == ref.token.encode():
                        raise  # the group is still in the pool, and its bytes are lost
            return found

    def peek(self, count: int, task: str, status: PoolStatus = "completed") -> list[ManifestEntry]:
        """Return references to the payloads that `get` would read; a take may choose others."""
        task = self._known(task)
        is_trained = status == "completed" and self._limits.tasks[task].eval_of is None
        order = self._limits.order if is_trained else "staleness"
        threshold = None if status == "expired" else self._limits.threshold(task)
        keys = self._keys.slots(task=task, status=status)
        arguments = {"order": order, "threshold": threshold, "limit": count}
        _, *entries = self._store.call("peek", keys, arguments)
        return [ManifestEntry.parse(entry) for entry in entries]

    def age_limit(self, gid: str) -> AgeLimit | None:
        """Return the limit by which members of a group start again; None for an evaluation.

        A member that a `refresh` found too old stays too old, even if thresholds were raised since.
        """
        task = split_group_id(gid)[0]
        threshold = self._limits.threshold(task)
        if threshold is None:
            return None
        keys = self._keys
        (taken, awaits), cut, forks = self._store.send(
            "age limit",
            [
                ("HMGET", keys.ledger("train"), "taken", "awaits"),
                ("HGET", keys.group(gid), "cut"),
                ("LRANGE", keys.lineages, -1000, -1),
            ],
        )
        step = next_step(int(taken or 0), int(awaits or 0))
        lowest = max(int(cut or 0), step - threshold)
        named = [fork.decode().rpartition(":") for fork in forks]
        pairs = [(lineage, int(step)) for lineage, _, step in named]
        return AgeLimit(lowest, self._limits.token_lead(task), pairs)

    def read(self, ref: PayloadRef) -> RolloutGroup:
        """Return the group of a payload. Raises PayloadMissing or WireError."""
        return self.read_many([ref])[0]

    def read_many(self, refs: list[PayloadRef]) -> list[RolloutGroup]:
        """Return the groups of some payloads, in order. Raises PayloadMissing or WireError."""
        return self._payloads.read_each(refs, _decoded)

    def load(
        self, manifest: Manifest, known: Mapping[PayloadRef, RolloutGroup] | None = None
    ) -> list[RolloutGroup]:
        """Return the groups of a batch, in order, with tokens that are too stale masked.

        The result is the same at every call (I5). `known` groups are not read again. Raises
        PayloadMissing or WireError.
        """
        refs = [entry.payload for entry in manifest.entries]
        loaded = dict(known or {})
        missing = [ref for ref in refs if ref not in loaded]
        loaded.update(zip(missing, self.read_many(missing), strict=True))
        groups = [loaded[ref] for ref in refs]
        mask_stale(manifest, groups)
        return groups

    # -- expire --------------------------------------------------------------

    def refresh_staleness(self, *tasks: str, statuses: Collection[str] = AGING) -> dict[str, int]:
        """Expire the groups of these tasks (default: all that train) that became too stale.

        `statuses`: completed and aborted, or one of them. Returns how many groups of each task were
        moved; O(log N + moved). Takes check staleness themselves (I8). Raises ConfigError for an
        unknown task or another status.
        """
        names = [self._known(task) for task in (tasks or self._limits.training_tasks)]
        if unknown := sorted({*map(str, statuses)}.difference(AGING)):
            raise ConfigError(
                f"groups that are {' or '.join(unknown)} do not become too stale",
                hint=f"statuses: {', '.join(AGING)}",
            )
        moved: dict[str, int] = {}
        for task in names:
            if self._limits.threshold(task) is None:
                continue
            moved[task] = 0
            for status in statuses:
                some = GROUPS_PER_CALL
                while some == GROUPS_PER_CALL:
                    some = self.expire(task, status, GROUPS_PER_CALL)
                    moved[task] += some
        return moved

    def expire(self, task: str, status: str, limit: int) -> int:
        """Expire up to `limit` groups that are too stale for the next step; return how many."""
        arguments = {
            "task": task,
            "threshold": self._limits.threshold(task),
            "retryable": int(self._limits.retries_expired(task)),
            "passed": 0,
            "limit": limit,
        }
        slots = self._keys.slots(task=task, status=status)
        return int(self._store.call("expire", slots, arguments)[1])

    def _known(self, task: str) -> str:
        if task not in self._limits.tasks:
            raise ConfigError(
                f"there is no task {task!r}", hint=f"known: {', '.join(self._limits.tasks)}"
            )
        return task


def mask_stale(manifest: Manifest, groups: Sequence[RolloutGroup]) -> None:
    """Mask the tokens of a batch that are too stale for its step."""
    if manifest.token_threshold is not None:
        for group in groups:
            group.mask = group.fresh_mask(manifest.step, manifest.token_threshold, manifest.forks)


def _decoded(refs: Sequence[PayloadRef], payloads: Sequence[Whole]) -> list[RolloutGroup]:
    groups = group_bytes.decode_each(payloads, [ref.crc for ref in refs])
    for ref, group in zip(refs, groups, strict=True):
        if group.gid != ref.gid:
            raise WireError(f"the payload of {ref.gid} holds group {group.gid!r}")
    return groups
