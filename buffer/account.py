"""The account: every group is in exactly one place, and nothing is trained twice (I1, I6).

Totals come from one script, at one instant, and are kept twice: structures (streams, sorted sets, bitmaps) and
counters that move in the same scripts; both must agree with `enqueued + imported`. Membership is then proved draw by
draw, each looked at from every side at one instant: paging through two live sets would report false losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from buffer.keys import ENDS, IMPORTED_FROM, LANES, POOLS, Keys, group_id, split_group_id
from buffer.ledger import BatchLedger
from buffer.limits import RunLimits
from buffer.store import Store

_COUNTERS = (
    "cursor",
    "enqueued",
    "target",
    "consumed",
    "running",
    "judging",
    "taken",
    "archived",
    "dead",
    "filtered",
    "dropped",
    "imported",
)
PLACES = (
    "waiting",
    "running",
    "judging",
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

_WIDTH = len(LANES) + len(POOLS) + len(_COUNTERS) + len(ENDS)


@dataclass(frozen=True, slots=True)
class TaskAccount:
    """Groups of one task by place, at one instant."""

    task: str
    waiting: int
    running: int
    judging: int
    completed: int
    aborted: int
    expired: int
    taken: int
    archived: int
    dead: int
    filtered: int
    dropped: int
    enqueued: int
    imported: int
    cursor: int
    target: int
    consumed: int
    ended_bits: tuple[int, int, int]

    @property
    def places(self) -> dict[str, int]:
        """Groups by place; their sum must be `entered`."""
        return {name: getattr(self, name) for name in PLACES}

    @property
    def entered(self) -> int:
        """Groups that ever came in: drawn from the data set, or imported."""
        return self.enqueued + self.imported

    def faults(self) -> Iterator[str]:
        """What does not add up."""
        total = sum(self.places.values())
        if total != self.entered:
            imported = f" and {self.imported} imported" if self.imported else ""
            yield f"{self.task}: {self.enqueued} enqueued{imported}, but {total} in all places"
        if self.enqueued != self.cursor:
            yield f"{self.task}: {self.enqueued} enqueued, but the cursor is at {self.cursor}"
        for end, bits in zip(ENDS, self.ended_bits, strict=True):
            if bits != getattr(self, end):
                yield f"{self.task}: {getattr(self, end)} counted as {end}, {bits} in the bitmap"


@dataclass(slots=True)
class Audit:
    """The outcome of `fsck`."""

    tasks: list[TaskAccount]
    leases: int
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
        self._store, self._keys, self._limits = store, keys, limits

    def totals(self) -> Audit:
        """All places of all tasks at one instant. O(tasks)."""
        keys, names = self._keys, list(self._limits.tasks)
        tail = [
            key
            for task in names
            for key in (
                *keys.all_jobs(task),
                *keys.all_pools([task]),
                keys.progress(task),
                *(keys.ended(task, end) for end in ENDS),
            )
        ]
        reply = self._store.call("totals", {"leases": keys.leases, "dead": keys.dead}, {}, tail)
        numbers = [int(n) for n in reply[1:]]
        tasks = [_task(name, numbers[2 + i * _WIDTH : 2 + (i + 1) * _WIDTH]) for i, name in enumerate(names)]
        audit = Audit(tasks, leases=numbers[0])
        audit.faults = [fault for task in tasks for fault in task.faults()]
        if (running := sum(t.running + t.judging for t in tasks)) != numbers[0]:
            audit.faults.append(f"{running} groups counted as running, {numbers[0]} leases")
        if (dead := sum(t.dead for t in tasks)) != numbers[1]:
            audit.faults.append(f"{dead} groups counted as dead, {numbers[1]} dead letters")
        return audit

    def fsck(self) -> Audit:
        """`totals`, then every draw of every task by itself, then every manifest. Works on a live run."""
        audit = self.totals()
        for task in audit.tasks:
            for draw in chain(range(task.cursor), range(IMPORTED_FROM, IMPORTED_FROM + task.imported)):
                self._check(audit, task.task, draw)
        for ledger in ("train", "eval"):
            self._check_manifests(audit, BatchLedger(self._store, self._keys, self._limits, ledger))
        return audit

    def _check(self, audit: Audit, task: str, draw: int) -> None:
        gid = group_id(task, draw)
        places = self.places(task, draw)
        audit.checked += 1
        if not places:
            audit.lost.append(gid)
        elif len(places) > 1:
            audit.doubled.append(f"{gid} ({', '.join(places)})")

    def places(self, task: str, draw: int) -> list[str]:
        """Where a draw is, seen from every structure at one instant: one place is right."""
        keys, gid = self._keys, group_id(task, draw)
        reply = self._store.call(
            "check",
            {
                "group": keys.group(gid),
                "leases": keys.leases,
                "dead": keys.dead,
                **{end: keys.ended(task, end) for end in ENDS},
                **{status: keys.pool(task, status) for status in POOLS},
                "batches": keys.manifests,
            },
            {"gid": gid, "draw": draw},
            keys.all_jobs(task),
        )
        return [str(place) for place in reply[2:]]

    def _check_manifests(self, audit: Audit, ledger: BatchLedger) -> None:
        taken, _, freed = ledger.steps()
        seen: Counter[str] = Counter()
        for step in range(freed + 1, taken + 1):
            manifest = ledger.manifest(step)
            if manifest is None and step > ledger.steps()[2]:
                audit.faults.append(f"the manifest of {ledger.name} step {step} is gone")
            for gid in manifest.gids if manifest else []:
                seen[gid] += 1
                places = self.places(*split_group_id(gid))
                # a group may be archived between the two looks, but never leaves a batch otherwise
                if places not in (["taken"], ["archived"]):
                    audit.doubled.append(f"{gid} (batch {step} of {ledger.name}; {', '.join(places) or 'nowhere'})")
        audit.doubled += [f"{gid} (in {n} batches)" for gid, n in seen.items() if n > 1]


def _task(name: str, row: list[int]) -> TaskAccount:
    counters = dict(zip(_COUNTERS, row[6:18], strict=True))
    return TaskAccount(
        task=name,
        waiting=sum(row[:3]),
        completed=row[3],
        aborted=row[4],
        expired=row[5],
        ended_bits=(row[18], row[19], row[20]),
        **counters,
    )
