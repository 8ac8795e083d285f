"""Do what is due from time to time: end leases, expire groups, forget batches, free bytes.

Any number of processes may sweep at once, without a leader or a lock, and each may die at any
point: a repeated step finds nothing to do (I13).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from buffer.errors import LostRun
from buffer.groups.job_queue import JobQueue
from buffer.groups.pools import expire
from buffer.ids import ENDS, split_group_id
from buffer.ledger.ledger import BatchLedger
from buffer.redis.keys import Keys
from buffer.redis.media_folder import MediaFolder
from buffer.redis.payloads import PayloadStore
from buffer.redis.store import RunContext, Store

log = logging.getLogger("rolloutmq.janitor")

LOOK = 500  # folders that one sweep compares at most

PASS_S = 10.0  # shortest time between the starts of two passes over all folders


class MediaSweep:
    """Compares the media folder of a run with its groups, a part at a time."""

    def __init__(
        self, store: Store, keys: Keys, media: MediaFolder, ledgers: Sequence[BatchLedger]
    ) -> None:
        self._store = store
        self._keys = keys
        self._media = media
        self._ledgers = ledgers
        self._retained: dict[tuple[str, int], frozenset[str]] = {}
        self._pass: Iterator[str] | None = None
        self._begun_s = float("-inf")

    def sweep(self) -> tuple[int, bool]:
        """Free the next folders; return (groups freed, whether folders are left)."""
        try:
            return self._sweep()
        except OSError as error:
            log.warning("cannot delete files of ended groups, trying again later: %s", error)
            self._pass = None
            return 0, False

    def _sweep(self) -> tuple[int, bool]:
        if self._pass is None:
            if time.monotonic() - self._begun_s < PASS_S or not self._media.is_ours():
                return 0, False
            self._pass = self._media.gids()
            self._begun_s = time.monotonic()
        gids = list(islice(self._pass, LOOK))
        if len(gids) < LOOK:
            self._pass = None
        ended = self._ended(gids)
        for gid in ended:
            self._media.free(gid)
        return len(ended), self._pass is not None

    def _ended(self, gids: Sequence[str]) -> list[str]:
        """Return those of `gids` that have ended and can no longer be read."""
        ends = self._ends(gids)
        if "archived" not in ends.values():
            return list(ends)
        retained = self._retained_gids()
        return [gid for gid, end in ends.items() if gid not in retained]

    def _ends(self, gids: Sequence[str]) -> dict[str, str]:
        keys = self._keys
        commands: list[tuple[str | int, ...]] = []
        for gid in gids:
            task, draw = split_group_id(gid)
            commands += [
                ("EXISTS", keys.group(gid)),
                *(("GETBIT", keys.ended(task, end), draw) for end in ENDS),
            ]
        replies = iter(self._store.each("media", commands, "control"))
        found = {}
        for gid in gids:
            lives = next(replies)
            bits = [next(replies) for _ in ENDS]
            if not lives and any(bits):
                found[gid] = ENDS[bits.index(1)]
        return found

    def _retained_gids(self) -> frozenset[str]:
        """Return archived groups that can be read; call after `_ends`, to include the newest."""
        kept: dict[tuple[str, int], frozenset[str]] = {}
        halves = []
        for ledger in self._ledgers:
            archived = ledger.archive.steps()
            for step in archived:
                # an archived batch never changes
                kept[ledger.name, step] = self._retained.get((ledger.name, step)) or self._gids(
                    ledger, step
                )
            halves.append(self._gids(ledger, archived.stop))
        self._retained = kept
        return frozenset().union(*kept.values(), *halves)

    def _gids(self, ledger: BatchLedger, step: int) -> frozenset[str]:
        manifest = ledger.manifest(step)
        return frozenset(manifest.gids if manifest else ())


REAP = 200  # leases that one sweep takes back at most

EXPIRE = 100  # groups that one sweep moves out of one pool at most

IN_TURN = 50  # sweeps in the time of one lease, by all processes that sweep in turn

FREE = 200  # payloads freed in one round trip; a sweep makes FREE_ROUNDS of them at most

FREE_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did, and whether work is left."""

    reaped: int = 0  # groups whose worker fell silent; they wait again
    buried: int = 0  # groups whose worker fell silent and whose tries are used up: dead letters
    gone_workers: int = 0  # workers that were silent for long and hold nothing; they are forgotten
    expired: int = 0  # groups that are too old for the next train step
    forgotten: int = 0  # archived batches that are no longer retained
    freed: int = 0  # payloads whose bytes are freed
    media: int = 0  # ended groups whose files are deleted
    has_more: bool = False  # a limit of this sweep was reached; sweep again at once
    grace_ms: int = 0  # how long leases are still spared after an outage (I11)


class Janitor:
    def __init__(
        self,
        context: RunContext,
        nonce: str,
        jobs: JobQueue,
        ledgers: Sequence[BatchLedger],
        payloads: PayloadStore,
        media: MediaFolder | None,
    ) -> None:
        self._context = context
        self._store, self._keys, self._limits = context
        self._nonce = nonce
        self._jobs = jobs
        self._ledgers = ledgers
        self._payloads = payloads
        self._media = MediaSweep(self._store, self._keys, media, ledgers) if media else None

    def sweep(self, *, files: bool = True, archive: bool = True) -> Swept:
        """Do what is due, up to a limit for each kind of work; see `Swept.has_more`.

        Without `files`, no disk is touched; without `archive`, no batch, which workers must not do
        (redis/server/acl.py). Raises LostRun if another run has the name, as these limits are not
        its own.
        """
        if not self._is_there():
            return Swept()
        reaped = self._jobs.reap(REAP)
        expired = [
            expire(self._context, task, status, EXPIRE)
            for task in self._limits.training_tasks
            for status in ("completed", "aborted")
        ]
        expired += [self._jobs.expire_waiting(task, EXPIRE) for task in self._limits.training_tasks]
        forgotten = [ledger.archive.forget_slice() for ledger in self._ledgers if archive]
        freed = self._free()
        media, has_files = self._media.sweep() if self._media and files else (0, False)
        return Swept(
            reaped.waiting,
            reaped.buried,
            reaped.gone_workers,
            sum(expired),
            sum(batches for _, batches, _ in forgotten),
            freed,
            media,
            has_more=has_files
            or reaped.groups == REAP
            or EXPIRE in expired
            or any(left for _, _, left in forgotten)
            or freed == FREE * FREE_ROUNDS,
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

    def _is_there(self) -> bool:
        """Return whether the server holds the run: the trainer restores one that is lost."""
        found = self._store.ask("janitor", "HGET", self._keys.meta, "nonce")
        if found is not None and found.decode() != self._nonce:
            raise LostRun(
                f"the server holds another run named {self._keys.run!r} now",
                hint="start this process again",
            )
        return found is not None

    def _free(self) -> int:
        total = 0
        for _ in range(FREE_ROUNDS):
            freed = self._payloads.collect(FREE)
            total += freed
            if freed < FREE:
                break
        return total
