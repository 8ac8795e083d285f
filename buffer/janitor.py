"""Do what is due from time to time: end leases, expire groups, forget batches, free bytes.

Any number of processes may sweep at once, without a leader or a lock, and each may die at any
point: a repeated step finds nothing to do (I13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from buffer.errors import LostRun
from buffer.groups.job_queue import JobQueue
from buffer.groups.replay_buffer import ReplayBuffer
from buffer.ledger.ledger import BatchLedger
from buffer.maintenance.column_files import ColumnFolder, ColumnSweep
from buffer.redis.bounds import GROUPS_PER_CALL
from buffer.redis.payloads import PayloadStore
from buffer.redis.store import RunContext

IN_TURN = 50  # sweeps in the time of one lease, by all processes that sweep in turn

FREE_ROUNDS = 20  # in which one sweep frees payloads


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did, and whether work is left."""

    reaped: int = 0  # groups whose worker fell silent; they wait again
    buried: int = 0  # groups whose worker fell silent and whose tries are used up: dead letters
    gone_workers: int = 0  # workers that were silent for long and hold nothing; they are forgotten
    expired: int = 0  # groups that are too old for the next train step
    forgotten: int = 0  # archived batches that are no longer retained
    freed: int = 0  # payloads whose bytes are freed
    columns: int = 0  # ended groups whose files are deleted
    has_more: bool = False  # a limit of this sweep was reached; sweep again at once
    grace_ms: int = 0  # how long leases are still spared after an outage (I11)


class Janitor:
    def __init__(
        self,
        context: RunContext,
        nonce: str,
        jobs: JobQueue,
        buffer: ReplayBuffer,
        ledgers: Sequence[BatchLedger],
        payloads: PayloadStore,
        columns: ColumnFolder,
    ) -> None:
        self._store, self._keys, self._limits, _ = context
        self._nonce = nonce
        self._jobs = jobs
        self._buffer = buffer
        self._ledgers = ledgers
        self._payloads = payloads
        self._columns = ColumnSweep(self._store, self._keys, columns, ledgers)

    def sweep(self, *, files: bool = True, archive: bool = True) -> Swept:
        """Do what is due, up to a limit for each kind of work; see `Swept.has_more`.

        Without `files`, no disk is touched; without `archive`, no batch, which workers must not do
        (redis/server/acl.py). Raises LostRun if another run has the name, as these limits are not
        its own.
        """
        found = self._store.ask("janitor", "HGET", self._keys.meta, "nonce")
        if found is None:
            return Swept()  # the trainer restores a run that is lost
        if found.decode() != self._nonce:
            raise LostRun(
                f"the server holds another run named {self._keys.run!r} now",
                hint="start this process again",
            )
        reaped = self._jobs.reap(GROUPS_PER_CALL)
        expired = [
            self._buffer.expire(task, status, GROUPS_PER_CALL)
            for task in self._limits.training_tasks
            for status in ("completed", "aborted")
        ]
        expired += [
            self._jobs.expire_waiting(task, GROUPS_PER_CALL) for task in self._limits.training_tasks
        ]
        forgotten = [ledger.archive.forget_slice() for ledger in self._ledgers if archive]
        freed = self._free()
        columns, has_files = self._columns.sweep() if files else (0, False)
        return Swept(
            reaped.waiting,
            reaped.buried,
            reaped.gone_workers,
            sum(expired),
            sum(batches for _, batches, _ in forgotten),
            freed,
            columns,
            has_more=has_files
            or reaped.groups == GROUPS_PER_CALL
            or GROUPS_PER_CALL in expired
            or any(left for _, _, left in forgotten)
            or freed == GROUPS_PER_CALL * FREE_ROUNDS,
            grace_ms=reaped.grace_ms,
        )

    def sweep_in_turn(self) -> Swept:
        """Sweep leases and bytes, unless another process just did: 1,000 workers take turns."""
        fields = self._store.ask("janitor", "HMGET", self._keys.clock, "seen_ms", "swept_ms")
        seen_ms, swept_ms = (int(field or 0) for field in fields)
        if 0 <= seen_ms - swept_ms < self._limits.lease_ms / IN_TURN:
            return Swept()
        # no files: a disk that hangs must not stop the heartbeats of a worker
        return self.sweep(files=False, archive=False)

    def _free(self) -> int:
        total = 0
        for _ in range(FREE_ROUNDS):
            freed = self._payloads.collect(GROUPS_PER_CALL)
            total += freed
            if freed < GROUPS_PER_CALL:
                break
        return total
