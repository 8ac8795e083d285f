"""The account: every group is in exactly one place, and nothing is trained twice (I1, I6).

Totals come from one script, at one instant, and are kept twice: structures (streams, sorted sets,
bitmaps) and counters that move in the same scripts; both must agree with `enqueued + put +
imported`. Membership is then proved draw by draw, each looked at from every side at one instant:
paging through two live sets would report false losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from buffer.batches.ledger import BatchLedger
from buffer.batches.memory import ByteCount, Memory
from buffer.model.ids import ENDS, IMPORTED_FROM, LANES, POOLS, group_id, split_group_id
from buffer.model.limits import RunLimits
from buffer.store.keys import Keys, SlotKeys
from buffer.store.scripts import Arg
from buffer.store.store import Store

_COUNTERS = (
    "cursor",
    "enqueued",
    "target",
    "consumed",
    "running",
    "taken",
    "archived",
    "dead",
    "filtered",
    "dropped",
    "put",
    "imported",
    "ahead",
    "reach",
)
PLACES = (
    "waiting",
    "running",
    "completed",
    "aborted",
    "expired",
    "taken",
    "archived",
    "dead",
    "filtered",
    "dropped",
)
"""Where a group can be; it is in exactly one of them."""

SLICE = 200
"""Draws that are looked at in one round trip."""

_WIDTH = len(LANES) + len(POOLS) + len(_COUNTERS) + len(ENDS)


@dataclass(frozen=True, slots=True)
class TaskAccount:
    """Groups of one task by place, at one instant."""

    task: str
    waiting: int
    running: int
    completed: int
    aborted: int
    expired: int
    taken: int
    archived: int
    dead: int
    filtered: int
    dropped: int
    enqueued: int
    put: int
    imported: int
    cursor: int
    ahead: int
    """groups that came in although the cursor has not passed them: after a loss it is behind them"""
    reach: int
    target: int
    consumed: int
    ended_bits: tuple[int, int, int]

    @property
    def places(self) -> dict[str, int]:
        """Groups by place; their sum must be `entered`."""
        return {name: getattr(self, name) for name in PLACES}

    @property
    def drawn(self) -> int:
        """No draw of the data set from here on came in."""
        return max(self.cursor, self.reach)

    @property
    def entered(self) -> int:
        """Groups that ever came in: drawn from the data set, put, or imported."""
        return self.enqueued + self.outside

    @property
    def outside(self) -> int:
        """Groups that were not drawn from the data set."""
        return self.put + self.imported

    def faults(self) -> Iterator[str]:
        """What does not add up."""
        total = sum(self.places.values())
        if total != self.entered:
            others = "".join(
                f" and {n} {how}"
                for how, n in (("put", self.put), ("imported", self.imported))
                if n
            )
            yield f"{self.task}: {self.enqueued} enqueued{others}, but {total} in all places"
        if self.enqueued != self.cursor + self.ahead:
            ahead = f", {self.ahead} ahead of it" if self.ahead else ""
            yield f"{self.task}: {self.enqueued} enqueued, but the cursor is at {self.cursor}{ahead}"
        for end, bits in zip(ENDS, self.ended_bits, strict=True):
            if bits != getattr(self, end):
                yield f"{self.task}: {getattr(self, end)} counted as {end}, {bits} in the bitmap"


@dataclass(slots=True)
class Audit:
    """The outcome of `fsck`."""

    tasks: list[TaskAccount]
    leases: int
    bytes: ByteCount
    checked: int = 0
    faults: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.faults or self.lost or self.doubled)


class Account:
    """Reads the account of one run; changes nothing."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    def totals(self) -> Audit:
        """All places of all tasks at one instant. O(tasks)."""
        keys = self._keys
        names = list(self._limits.tasks)
        reply = self._store.call(
            "totals", keys.slots(), {}, [keys.slots(task=task) for task in names]
        )
        numbers = [int(n) for n in reply[1:]]
        tasks = [
            _task(name, numbers[4 + i * _WIDTH : 4 + (i + 1) * _WIDTH])
            for i, name in enumerate(names)
        ]
        audit = Audit(tasks, leases=numbers[0], bytes=ByteCount(numbers[2], numbers[3]))
        audit.faults = [fault for task in tasks for fault in task.faults()]
        if (running := sum(t.running for t in tasks)) != numbers[0]:
            audit.faults.append(f"{running} groups counted as running, {numbers[0]} leases")
        if (dead := sum(t.dead for t in tasks)) != numbers[1]:
            audit.faults.append(f"{dead} groups counted as dead, {numbers[1]} dead letters")
        return audit

    def fsck(self) -> Audit:
        """`totals`, then every draw of every task by itself, every manifest, and the bytes. Works
        on a live run.
        """
        audit = self.totals()
        for task in audit.tasks:
            draws = chain(range(task.drawn), range(IMPORTED_FROM, IMPORTED_FROM + task.outside))
            while gids := [group_id(task.task, draw) for draw in islice(draws, SLICE)]:
                self._check(audit, gids, task.cursor)
        for ledger in ("train", "eval"):
            self._check_manifests(audit, BatchLedger(self._store, self._keys, self._limits, ledger))
        audit.faults += Memory(self._store, self._keys, self._limits).faults()
        return audit

    def _check(self, audit: Audit, gids: Sequence[str], cursor: int) -> None:
        for gid, places in zip(gids, self.places_of(gids), strict=True):
            audit.checked += 1
            if not places and not cursor <= split_group_id(gid)[1] < IMPORTED_FROM:
                audit.lost.append(gid)
            elif len(places) > 1:
                audit.doubled.append(f"{gid} ({', '.join(places)})")

    def places(self, task: str, draw: int) -> list[str]:
        """Where a draw is, seen from every structure at one instant: one place is right."""
        return self.places_of([group_id(task, draw)])[0]

    def places_of(self, gids: Sequence[str]) -> list[list[str]]:
        """`places` of some groups, in one round trip: each is seen at one instant, all of them are
        not.
        """
        replies = self._store.call_many("check", [self._check_call(gid) for gid in gids])
        return [[str(place) for place in reply[2:]] for reply in replies]

    def _check_call(self, gid: str) -> tuple[SlotKeys, dict[str, Arg]]:
        task, draw = split_group_id(gid)
        return self._keys.slots(gid=gid, task=task), {"gid": gid, "draw": draw}

    def _check_manifests(self, audit: Audit, ledger: BatchLedger) -> None:
        taken, _, freed = ledger.steps()
        seen: Counter[str] = Counter()
        for step in range(freed + 1, taken + 1):
            manifest = ledger.manifest(step)
            if manifest is None and step > ledger.steps()[2]:
                audit.faults.append(f"the manifest of {ledger.name} step {step} is gone")
            gids = manifest.gids if manifest else []
            seen.update(gids)
            for gid, places in zip(gids, self._places_in_slices(gids), strict=True):
                # a group may be archived between the two looks, but never leaves a batch otherwise
                if places not in (["taken"], ["archived"]):
                    audit.doubled.append(
                        f"{gid} (batch {step} of {ledger.name}; {', '.join(places) or 'nowhere'})"
                    )
        audit.doubled += [f"{gid} (in {n} batches)" for gid, n in seen.items() if n > 1]

    def _places_in_slices(self, gids: Sequence[str]) -> Iterator[list[str]]:
        for start in range(0, len(gids), SLICE):
            yield from self.places_of(gids[start : start + SLICE])


def _task(name: str, row: list[int]) -> TaskAccount:
    counters = dict(zip(_COUNTERS, row[6:20], strict=True))
    return TaskAccount(
        task=name,
        waiting=sum(row[:3]),
        completed=row[3],
        aborted=row[4],
        expired=row[5],
        ended_bits=(row[20], row[21], row[22]),
        **counters,
    )
