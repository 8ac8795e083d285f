"""What is ready, interrupted and expired, by task: read, never changed.

A pool is a sorted set scored by the oldest policy version in the group, its members ordered by
arrival. Being too old is a range of scores, never a scan, and no answer relies on expiry having run
(I8): what the next train step may not use is neither counted nor returned as ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from buffer.errors import ConfigError, PayloadMissing, WireError
from buffer.groups.order_index import expire_all
from buffer.model import wire
from buffer.model.group import RolloutGroup
from buffer.model.ids import POOLS
from buffer.model.job import PayloadRef
from buffer.model.limits import RunLimits
from buffer.model.manifest import ManifestEntry
from buffer.store.keys import Keys
from buffer.store.payloads import PayloadStore
from buffer.store.store import Store

PoolStatus = Literal["completed", "aborted", "expired"]

MAX_READ = 1024
"""Groups that one call reads at most; as many as a batch may hold."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Groups of one task. `completed` and `aborted` may still be used by the next train step;
    `stale` are in one of these pools, but too old: `refresh_staleness` moves them.
    """

    completed: int
    aborted: int
    expired: int
    stale: int


class Pools:
    """The pools of one run, to look at."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, payloads: PayloadStore) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
        self._payloads = payloads

    def count(self, task: str, status: PoolStatus = "completed") -> int:
        """How many groups of a task are ready (aborted, expired). O(log N). ConfigError for another
        task or status.
        """
        if status not in POOLS:
            raise ConfigError(f"no pool of {status!r} groups", hint=f"known: {', '.join(POOLS)}")
        count: int = getattr(self.count_statuses(task)[task], status)
        return count

    def count_statuses(self, *tasks: str) -> dict[str, PoolSizes]:
        """How many groups of each status these tasks (default: all) have, at one instant. O(tasks *
        log N).
        """
        names = [self._known(task) for task in (tasks or self._limits.tasks)]
        reply = self._store.call(
            "counts",
            self._keys.slots(),
            {},
            [self._keys.slots(task=task) for task in names],
            [self._limits.threshold(task) for task in names],
        )
        numbers = [int(number) for number in reply[1:]]
        return {task: PoolSizes(*numbers[4 * i : 4 * i + 4]) for i, task in enumerate(names)}

    def is_ready(self, counts: Mapping[str, int]) -> bool:
        """Whether each task has so many ready groups; counts of 0 or less ask for nothing. O(tasks
        * log N).

        For a glance only: `take_batch` decides by itself, in the step that takes.
        """
        wanted = {task: count for task, count in counts.items() if count > 0}
        if not wanted:
            return True
        sizes = self.count_statuses(*wanted)
        return all(sizes[task].completed >= count for task, count in wanted.items())

    def get(self, count: int, task: str, status: PoolStatus = "completed") -> list[RolloutGroup]:
        """The first `count` groups of a pool (1,024 at most), in the order in which they will be
        used. They stay there.

        Completed groups come in the order of the run's policy (by age, until the trainer has
        settled a policy that was changed); others as `reissue` finds them, the oldest first.
        Whatever leaves the pool while its bytes are read is left out.
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
        """Where the bytes are that `get` would read. Promises nothing: a take decides by itself."""
        task = self._known(task)
        is_trained = status == "completed" and self._limits.tasks[task].eval_of is None
        policy = self._limits.order if is_trained else "staleness"
        threshold = "" if status == "expired" else self._limits.threshold(task)
        while True:
            reply = self._call_peek(count, task, status, policy, threshold)
            match reply[0]:
                case "BLOCKED":
                    expire_all(self._store, self._keys, self._limits, task, status)
                case "UNORDERED":
                    policy = "staleness"
                case _:
                    return [ManifestEntry.parse(line) for line in reply[1:]]

    def _call_peek(
        self, count: int, task: str, status: str, policy: str, threshold: int | str
    ) -> list[str]:
        return self._store.call(
            "peek",
            self._keys.slots(task=task, status=status),
            {"policy": policy, "threshold": threshold, "limit": count},
        )

    def read(self, ref: PayloadRef) -> RolloutGroup:
        """The group behind a payload. Raises PayloadMissing or WireError."""
        return self.read_many([ref])[0]

    def read_many(self, refs: list[PayloadRef]) -> list[RolloutGroup]:
        """The groups behind some payloads, in order. Raises PayloadMissing or WireError."""
        return self._payloads.read_each(refs, _decoded)

    def _read_if_there(self, ref: PayloadRef) -> RolloutGroup | None:
        try:
            return self.read(ref)
        except PayloadMissing:
            record = self._keys.group(ref.gid)
            token = self._store.retrying("get", lambda: self._store.control.hget(record, "payload"))
            if token == ref.token.encode():
                raise  # it has not left: its bytes are lost
            return None

    def _known(self, task: str) -> str:
        if task not in self._limits.tasks:
            raise ConfigError(
                f"there is no task {task!r}", hint=f"known: {', '.join(self._limits.tasks)}"
            )
        return task


def _decoded(ref: PayloadRef, data: bytes | memoryview) -> RolloutGroup:
    group = wire.decode(data)
    if group.gid != ref.gid:
        raise WireError(f"the payload of {ref.gid} says that it is {group.gid!r}")
    return group
