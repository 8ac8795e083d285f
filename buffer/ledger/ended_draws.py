"""Report to a server that lost data which draws ended, and which are to be drawn again (I3, I6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from buffer.errors import LedgerError
from buffer.ids import IMPORTED_FROM, split_group_id
from buffer.ledger.position import Bools, DrawSet, Position
from buffer.redis.bounds import GROUPS_PER_CALL
from buffer.redis.key_fields import read_counts
from buffer.redis.scripts import unfenced
from buffer.redis.store import RunContext

Ending = tuple[int, str]  # a draw, and its end: archived, dropped, skipped, or again


@dataclass(frozen=True, slots=True)
class _Draws:
    """One task on the server; numbers from `drawn` and `added_by_hand` on never entered."""

    drawn: int
    added_by_hand: int
    archived: Bools
    imported: Bools
    skipped: Bools


class EndedDraws:
    """Compare the server's bitmaps with what was trained, and correct the server.

    `changed` counts the draws that were ended or revived, `lost` those to be drawn again.
    """

    def __init__(self, context: RunContext, nonce: str) -> None:
        self._store, self._keys, self._limits, _ = context
        self._nonce = nonce
        self.changed = self.lost = 0

    def end(self, position: Position, living: Collection[str]) -> None:
        """Archive every trained draw that is not in a batch (`living`), from every stage.

        Those that were skipped end as skipped.
        """
        for task in self._limits.training_tasks:
            known = self._known(task)
            in_batches = numbers_of(task, living)
            drawn = _of(position.trained.tasks, task)
            skipped = _of(position.skipped, task)
            imported = _of(position.trained.imported, task).to_bools()
            ends = [(draw, "archived") for draw in _missing(drawn.to_bools(), known.archived)]
            ends += [(draw, "skipped") for draw in _missing(skipped.to_bools(), known.skipped)]
            ends.sort()
            # an imported group that was lost cannot be restored, and its number is not used again
            last = int(imported.nonzero()[0].max(initial=-1))
            forgotten = range(known.added_by_hand, last + 1)
            for number in sorted({*_missing(imported, known.imported), *forgotten}):
                ends.append((IMPORTED_FROM + number, "archived" if imported[number] else "dropped"))
            ends = [(draw, end) for draw, end in ends if draw not in in_batches]
            seen = position.cursors.get(task, 0)
            ended = (drawn, skipped)
            lost = sum(all(draw not in each for each in ended) for draw in range(known.drawn, seen))
            self._assert(task, ends, seen, lost)

    def revive(self, position: Position) -> None:
        """Let untrained archived draws be drawn again; drop imported ones, which cannot be."""
        for task in self._limits.training_tasks:
            self._assert(task, self._untrained(task, position), 0, 0)

    def has_untrained(self, position: Position) -> bool:
        """Return whether `revive` would change anything."""
        return any(self._untrained(task, position) for task in self._limits.training_tasks)

    def _untrained(self, task: str, position: Position) -> list[Ending]:
        known = self._known(task)
        drawn = _of(position.trained.tasks, task)
        imported = _of(position.trained.imported, task)
        again = [(draw, "again") for draw in _missing(known.archived, drawn.to_bools())]
        lost = _missing(known.imported, imported.to_bools())
        return again + [(IMPORTED_FROM + number, "dropped") for number in lost]

    def _known(self, task: str) -> _Draws:
        progress = self._keys.progress(task)
        archived, skipped = (self._keys.ended(task, end) for end in ("archived", "skipped"))
        counts, drawn, imported, left_out = self._store.send(
            "draws",
            [
                ("HMGET", progress, "cursor", "highest_draw", "lost_to", "put", "imported"),
                # one bitmap: imported groups are numbered from IMPORTED_FROM on
                ("GETRANGE", archived, 0, IMPORTED_FROM // 8 - 1),
                ("GETRANGE", archived, IMPORTED_FROM // 8, -1),
                ("GETRANGE", skipped, 0, IMPORTED_FROM // 8 - 1),
            ],
        )
        cursor, highest_draw, lost_to, put, added = (int(count or 0) for count in counts)
        bitmaps = [
            np.unpackbits(np.frombuffer(bitmap, "u1")).astype(bool)
            for bitmap in (drawn, imported, left_out)
        ]
        return _Draws(max(cursor, highest_draw, lost_to), put + added, *bitmaps)

    def _assert(self, task: str, ends: Sequence[Ending], seen: int, lost: int) -> None:
        rest = iter(ends)
        part = list(islice(rest, GROUPS_PER_CALL))
        while part or lost:
            reply = self._store.call(
                "mark_trained",
                self._keys.slots(),
                {
                    "nonce": self._nonce,
                    "task": task,
                    "first": IMPORTED_FROM,
                    "seen": seen,
                    "lost": lost,
                },
                tail_args=[value for ending in part for value in ending],
                durable=True,
            )
            expect_ok("mark_trained", reply)
            self.changed += int(reply[1])
            self.lost += lost
            part = list(islice(rest, GROUPS_PER_CALL))
            lost = 0


def note_draws(context: RunContext, position: Position) -> None:
    """Record in a position, before its checkpoint is written, what else a server could lose.

    That is how far the data sets were drawn, and which draws were skipped.
    """
    store, keys, limits, _ = context
    tasks = limits.training_tasks
    last = IMPORTED_FROM // 8 - 1
    reads = [("GETRANGE", keys.ended(task, "skipped"), 0, last) for task in tasks]
    cursors, *bitmaps = store.send("draws", [("HMGET", keys.cursors, *limits.tasks), *reads])
    names = list(limits.tasks)
    position.cursors = dict(zip(names, read_counts(keys.cursors, names, cursors), strict=True))
    found = zip(tasks, bitmaps, strict=True)
    position.skipped = {task: DrawSet(bits=bytearray(bits)) for task, bits in found if bits}


def expect_ok(script: str, reply: list[Any]) -> None:
    """Raise Fenced, or LedgerError for every other reply that is not OK."""
    match unfenced(reply, "trainer"):
        case ["OK", *_]:
            return
    raise LedgerError(
        f"the run changed while it was recovered ({script}: {' '.join(map(str, reply))})",
        hint="open the trainer again: it continues the recovery",
    )


def numbers_of(task: str, gids: Iterable[str]) -> set[int]:
    """Return the draws of a task among the given groups."""
    return {draw for name, draw in map(split_group_id, gids) if name == task}


def _of(sets: dict[str, DrawSet], task: str) -> DrawSet:
    return sets.get(task, DrawSet())


def _missing(wanted: Bools, found: Bools) -> list[int]:
    """Return the numbers that are in `wanted` and not in `found`."""
    missing = wanted.copy()
    missing[: len(found)] &= ~found[: len(wanted)]
    return [int(number) for number in np.flatnonzero(missing)]
