"""Free the media files of groups that have ended, found by comparing folders with draws.

A crash at any point leaves a folder that a later sweep finds. Folders of draws that are not known
yet are kept, since files are written before their group. So are those of archived groups whose
batch is retained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from buffer.ids import ENDS, split_group_id
from buffer.ledger.ledger import BatchLedger
from buffer.redis.keys import Keys
from buffer.redis.media_folder import MediaFolder
from buffer.redis.store import Store

log = logging.getLogger("rolloutmq.janitor")

LOOK = 500
"""Folders that one sweep compares at most."""

PASS_S = 10.0
"""Shortest time between the starts of two passes over all folders."""


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
        """Free the next folders; return (groups freed, whether there are more to compare)."""
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
        # read after the choice: a group that ended before a snapshot's hold is not in the snapshot
        if not ended or self._ask("exists", self._keys.snapshot_lock):
            return 0, self._pass is not None
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
        """Return how each group ended that has."""
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
        """Return archived groups whose batches can be read.

        Read after the ends of the groups, so that batches archived in between are included.
        """
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

    def _ask(self, command: str, key: str) -> Any:
        return self._store.retrying("media", lambda: getattr(self._store.control, command)(key))
