"""The janitor: what must be done from time to time, by anybody, and by nobody in particular.

Leases of silent workers run out, groups grow too old, archived batches fall out of what is
retained, and bytes that nobody needs are freed. Every step finds nothing when it is repeated (I13),
so any number of processes may sweep at once, without a leader or a lock, and each may die at any
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from buffer.batches.ledger import BatchLedger
from buffer.errors import LostRun
from buffer.groups.job_queue import JobQueue
from buffer.groups.order_index import expire
from buffer.maintenance.media_sweep import MediaSweep
from buffer.model.limits import RunLimits
from buffer.store.keys import Keys
from buffer.store.media_folder import MediaFolder
from buffer.store.payloads import PIN, PayloadStore, pin_listed
from buffer.store.store import Store

REAP = 200
"""Leases that one sweep takes back at most."""

EXPIRE = 250
"""Groups that one sweep moves out of one pool at most."""

IN_TURN = 50
"""Sweeps in the time of one lease, by all who sweep in turn; whoever sweeps by itself comes on top."""

FREE = 200
"""Payloads freed in one round trip; a sweep makes at most FREE_ROUNDS of them."""

FREE_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did, and whether there is more to do."""

    reaped: int = 0
    """groups whose worker fell silent: they wait again"""
    buried: int = 0
    """the same, with their tries used up: dead letters"""
    gone_workers: int = 0
    """workers that were silent for long and held nothing: forgotten"""
    expired: int = 0
    """groups that the next train step may not use any more"""
    forgotten: int = 0
    """archived batches that are no longer retained"""
    freed: int = 0
    """payloads whose bytes are freed"""
    media: int = 0
    """ended groups whose files are deleted"""
    has_more: bool = False
    """a bound was reached: sweep again at once"""
    grace_ms: int = 0
    """how long leases are still spared after an outage (I11)"""


class Janitor:
    """Sweeps one run. Needs no leader and no lock."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        nonce: str,
        limits: RunLimits,
        jobs: JobQueue,
        ledgers: Sequence[BatchLedger],
        payloads: PayloadStore,
        media: MediaFolder | None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._nonce = nonce
        self._limits = limits
        self._jobs = jobs
        self._ledgers = ledgers
        self._payloads = payloads
        self._media = MediaSweep(store, keys, media, ledgers) if media else None

    def sweep(self, *, files: bool = True, archive: bool = True) -> Swept:
        """Do what there is to do, up to a bound for each kind; see `Swept.has_more`.

        Without `files`, no disk is touched; without `archive`, no batch, which a worker may not
        (buffer/server/acl.py). Raises LostRun where another run has the name: it must not be swept
        by the limits of this one.
        """
        if not self._is_there():
            return Swept()
        reaped = self._jobs.reap(REAP)
        expired = [
            expire(self._store, self._keys, self._limits, task, status, EXPIRE)
            for task in self._limits.training_tasks
            for status in ("completed", "aborted")
        ]
        forgotten = [ledger.archive.forget_slice() for ledger in self._ledgers if archive]
        freed = self._free()
        media, goes_on = self._media.sweep() if self._media and files else (0, False)
        return Swept(
            reaped.waiting,
            reaped.buried,
            reaped.gone_workers,
            sum(expired),
            sum(batches for _, batches, _ in forgotten),
            freed,
            media,
            has_more=goes_on
            or reaped.groups == REAP
            or EXPIRE in expired
            or any(left for _, _, left in forgotten)
            or freed == FREE * FREE_ROUNDS,
            grace_ms=reaped.grace_ms,
        )

    def sweep_in_turn(self) -> Swept:
        """As one of many: leases and bytes only, and nothing where anybody has swept a moment ago.
        1,000 workers would else sweep 200 times a second, for a tenth of what they cost the server.
        """
        fields = self._store.retrying(
            "janitor", lambda: self._store.control.hmget(self._keys.clock, "seen_ms", "swept_ms")
        )
        seen_ms, swept_ms = (int(field or 0) for field in fields)
        if 0 <= seen_ms - swept_ms < self._limits.lease_ms / IN_TURN:
            return Swept()
        # a disk that hangs must not stop the heart of a worker
        return self.sweep(files=False, archive=False)

    def _is_there(self) -> bool:
        """Whether the server holds the run; one that came back empty is given it again by the
        trainer.
        """
        found = self._store.retrying(
            "janitor", lambda: self._store.control.hget(self._keys.meta, "nonce")
        )
        if found is not None and found.decode() != self._nonce:
            raise LostRun(
                f"the server holds another run named {self._keys.run!r} now",
                hint="start this process again",
            )
        return found is not None

    def _free(self) -> int:
        total = 0
        for _ in range(FREE_ROUNDS):
            if pin_listed(self._store, self._keys) < PIN:
                break
        for _ in range(FREE_ROUNDS):
            total += (freed := self._payloads.collect(FREE))
            if freed < FREE:
                break
        return total
