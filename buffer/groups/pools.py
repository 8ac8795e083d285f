"""Read the pools of a run: which groups of a task are completed, aborted or expired.

A pool is a sorted set scored by the oldest policy version in the group, its members ordered by
arrival. Too stale groups are a range of scores, which is neither counted nor returned, also if
expiry has not run yet (I8). Scripts never search without a bound: where too many stale groups stand
before the fresh ones, or the order index lacks ready groups (its policy was changed), they change
nothing and report it; the caller then calls `expire_all` or `fill_index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from buffer.errors import ConfigError, PayloadMissing, WireError
from buffer.ids import POOLS, split_group_id
from buffer.job import PayloadRef
from buffer.manifest import ManifestEntry
from buffer.redis.payloads import PayloadStore, Whole
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.staleness import AgeLimit, next_step

_SLICE = 100  # groups that one call moves or adds: the server answers other clients in between


AGING = ("completed", "aborted")  # the pools whose groups become too stale


def expire_all(context: RunContext, task: str, status: str) -> int:
    """Expire all stale groups of a pool, in slices; return how many."""
    moved = 0
    while (some := expire(context, task, status, _SLICE)) == _SLICE:
        moved += some
    return moved + some


def expire(context: RunContext, task: str, status: str, limit: int) -> int:
    """Expire up to `limit` groups that are too stale for the next train step; return how many."""
    store, keys, limits, _ = context
    arguments = {
        "task": task,
        "threshold": limits.threshold(task),
        "retryable": int(limits.retries_expired(task)),
        "passed": 0,
        "limit": limit,
    }
    _, moved, _ = store.call("expire", keys.slots(task=task, status=status), arguments)
    return int(moved)


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


class Pools:
    def __init__(self, context: RunContext, payloads: PayloadStore) -> None:
        self._context = context
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads

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
            return [group for ref in refs if (group := self._read_if_there(ref)) is not None]

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

    def _read_if_there(self, ref: PayloadRef) -> RolloutGroup | None:
        try:
            return self.read(ref)
        except PayloadMissing:
            record = self._keys.group(ref.gid)
            token = self._store.ask("get", "HGET", record, "payload")
            if token == ref.token.encode():
                raise  # the group is still in the pool, and its bytes are lost
            return None

    def _known(self, task: str) -> str:
        if task not in self._limits.tasks:
            raise ConfigError(
                f"there is no task {task!r}", hint=f"known: {', '.join(self._limits.tasks)}"
            )
        return task


def _decoded(refs: Sequence[PayloadRef], payloads: Sequence[Whole]) -> list[RolloutGroup]:
    groups = group_bytes.decode_each(payloads, [ref.crc for ref in refs])
    for ref, group in zip(refs, groups, strict=True):
        if group.gid != ref.gid:
            raise WireError(f"the payload of {ref.gid} holds group {group.gid!r}")
    return groups
