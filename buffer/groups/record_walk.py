"""Walk over the records of all living groups of a run, in order of their draws, page by page.

Ended draws are bits, so no keys are scanned: O(living groups) plus one bit per draw. On a live run
the records are of different times; a group that ends meanwhile is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.ids import ENDS, IMPORTED_FROM, group_id
from buffer.job import PayloadRef
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.key_fields import read_counts, require_fields, text_fields
from buffer.redis.keys import Keys
from buffer.redis.store import Store

PAGE_DRAWS = 2**19  # draws whose bits one round trip reads: 64 KiB of each bitmap

Record = dict[str, str]


class Entered(NamedTuple):
    """How many draws of a task the cursor passed, were drawn, and groups were put or imported."""

    cursor: int
    drawn: int
    by_hand: int


class RecordWalk:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def records(self, task: str) -> Iterator[tuple[str, Record]]:
        """Yield (gid, record) of a task's living groups, drawn ones first. Raises RunDamaged."""
        draws = (
            draw
            for first, ends in self.ends(task, self.entered(task))
            for draw in (np.flatnonzero(ends == 0) + first).tolist()
        )
        while page := list(islice(draws, KEYS_PER_TRIP)):
            gids = [group_id(task, draw) for draw in page]
            reads = [("HGETALL", self._keys.group(gid)) for gid in gids]
            for gid, raw in zip(gids, self._store.send("records", reads), strict=True):
                if record := text_fields(raw):
                    require_fields("group", self._keys.group(gid), record)
                    yield gid, record

    def entered(self, task: str) -> Entered:
        key = self._keys.progress(task)
        names = ("cursor", "highest_draw", "put", "imported")
        counts = self._store.ask("records", "HMGET", key, *names)
        cursor, highest_draw, put, imported = read_counts(key, names, counts)
        return Entered(cursor, max(cursor, highest_draw), put + imported)

    def ends(self, task: str, entered: Entered) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield first draws, and how many ends each draw from there on has: 0 for a living group.

        Each page covers up to PAGE_DRAWS draws.
        """
        for start, stop in ((0, entered.drawn), (IMPORTED_FROM, IMPORTED_FROM + entered.by_hand)):
            for first in range(start, stop, PAGE_DRAWS):
                ends = np.zeros(PAGE_DRAWS, "u1")
                for end in ENDS:
                    page = self.bits(self._keys.ended(task, end), first // 8)
                    bits = np.unpackbits(np.frombuffer(page, "u1"))
                    ends[: len(bits)] += bits
                yield first, ends[: stop - first]

    def bits(self, key: str, offset: int) -> bytes:
        """Return one page of a bitmap, from `offset` bytes on."""
        last = offset + PAGE_DRAWS // 8 - 1
        page: bytes = self._store.ask("bits", "GETRANGE", key, offset, last)
        return page


def payload_of(gid: str, record: Record) -> PayloadRef:
    """Return the reference to the bytes of a group that `RecordWalk.records` returned."""
    crc = "" if record["payload"] == "init" else record.get("crc", "")
    return PayloadRef(
        gid, record["payload"], int(record["chunks"]), int(record.get("size") or 0), crc
    )
