"""The account: every group is in exactly one stage, and nothing is trained twice (I1, I6).

Totals come from one script, at one instant, and are stored twice: in structures (streams, sorted
sets, bitmaps) and in counters that move in the same scripts; both must agree with `enqueued + put +
imported`. Membership is then proved draw by draw, and each draw is checked in all structures at one
instant: paging through two live sets would report false losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from buffer.batches.ledger import BatchLedger
from buffer.batches.memory import ByteCount, Memory
from buffer.model.damage import Damage, DamageKind
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
STAGES = (
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
"""Where a group can be, with the pool by status; a group is in exactly one of them."""

SLICE = 200
"""Draws that are checked in one round trip."""

_WIDTH = len(LANES) + len(POOLS) + len(_COUNTERS) + len(ENDS)


@dataclass(frozen=True, slots=True)
class TaskAccount:
    """Counts the groups of one task by stage, at one instant."""

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
    """groups that entered although the cursor is still before them, after the server lost data"""
    reach: int
    target: int
    consumed: int
    ended_bits: tuple[int, int, int]
    """bits in the bitmaps of ENDS"""

    @property
    def places(self) -> dict[str, int]:
        """Return the groups by stage; their sum must equal `entered`."""
        return {name: getattr(self, name) for name in STAGES}

    @property
    def drawn(self) -> int:
        """Return the first draw of the data set after all that ever entered."""
        return max(self.cursor, self.reach)

    @property
    def entered(self) -> int:
        """Return how many groups ever entered: drawn from the data set, put, or imported."""
        return self.enqueued + self.outside

    @property
    def outside(self) -> int:
        """Return how many groups entered that were not drawn from the data set."""
        return self.put + self.imported

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield (field of `progress`, sentence) for each pair of counts that disagree."""
        total = sum(self.places.values())
        if total != self.entered:
            put = f" and {self.put} put" if self.put else ""
            imported = f" and {self.imported} imported" if self.imported else ""
            entered = f"{self.enqueued} enqueued{put}{imported}"
            yield "enqueued", f"{self.task}: {entered}, but {total} in all stages"
        if self.enqueued != self.cursor + self.ahead:
            cursor = f"{self.cursor}, {self.ahead} ahead of it" if self.ahead else self.cursor
            yield "cursor", f"{self.task}: {self.enqueued} enqueued, but the cursor is at {cursor}"
        for end, bits in zip(ENDS, self.ended_bits, strict=True):
            counted = getattr(self, end)
            if bits != counted:
                yield end, f"{self.task}: {counted} counted as {end}, {bits} in the bitmap"


@dataclass(slots=True)
class Audit:
    """Contains the outcome of `fsck`."""

    tasks: list[TaskAccount]
    leases: int
    bytes: ByteCount
    checked: int = 0
    damage: list[Damage] = field(default_factory=list)
    """all that is wrong; `faults`, `lost` and `doubled` share it out, for people"""

    @property
    def clean(self) -> bool:
        """Return whether every group was found in exactly one stage and all counts agree."""
        return not self.damage

    @property
    def faults(self) -> list[str]:
        """Return in a sentence each what is wrong beside lost and doubled groups."""
        return [
            found.text
            for found in self.damage
            if found.kind not in (DamageKind.LOST, DamageKind.DOUBLED)
        ]

    @property
    def lost(self) -> list[str]:
        """Return the ids of groups that are in no stage."""
        return [found.gid for found in self.damage if found.kind is DamageKind.LOST]

    @property
    def doubled(self) -> list[str]:
        """Return the groups that are in two stages or batches, and in which."""
        return [found.text for found in self.damage if found.kind is DamageKind.DOUBLED]


class Account:
    """Reads the account of one run; changes nothing.

    Usage:
        audit = account.fsck()
        assert audit.clean, (audit.faults, audit.lost, audit.doubled)
    """

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    def totals(self) -> Audit:
        """Count all groups of all tasks at one instant. O(tasks)."""
        keys = self._keys
        names = list(self._limits.tasks)
        reply = self._store.call(
            "totals", keys.slots(), {}, [keys.slots(task=task) for task in names]
        )
        leases, letters, came, went, *rows = (int(number) for number in reply[1:])
        tasks = [_task(name, rows[i * _WIDTH : (i + 1) * _WIDTH]) for i, name in enumerate(names)]
        audit = Audit(tasks, leases=leases, bytes=ByteCount(came, went))
        audit.damage = [damage for task in tasks for damage in self._miscounts(task)]
        running = sum(task.running for task in tasks)
        dead = sum(task.dead for task in tasks)
        if running != leases:
            text = f"{running} groups counted as running, workers hold {leases}"
            audit.damage.append(Damage(DamageKind.COUNT, text, keys.leases))
        if dead != letters:
            text = f"{dead} groups counted as dead, {letters} dead letters"
            audit.damage.append(Damage(DamageKind.COUNT, text, keys.dead))
        return audit

    def _miscounts(self, task: TaskAccount) -> Iterator[Damage]:
        key = self._keys.progress(task.task)
        for name, text in task.faults():
            yield Damage(DamageKind.COUNT, text, key, field=name, task=task.task)

    def fsck(self) -> Audit:
        """Check the totals, every draw of every task, every manifest, what workers hold, the bytes.

        Works on a live run.
        """
        audit = self.totals()
        for task in audit.tasks:
            draws = chain(range(task.drawn), range(IMPORTED_FROM, IMPORTED_FROM + task.outside))
            while gids := [group_id(task.task, draw) for draw in islice(draws, SLICE)]:
                self._check(audit, gids, task.cursor)
        for ledger in ("train", "eval"):
            self._check_manifests(audit, BatchLedger(self._store, self._keys, self._limits, ledger))
        audit.damage += self._check_holds()
        audit.damage += Memory(self._store, self._keys, self._limits).damage()
        return audit

    def _check(self, audit: Audit, gids: Sequence[str], cursor: int) -> None:
        for gid, stages in zip(gids, self.places_of(gids), strict=True):
            audit.checked += 1
            task, draw = split_group_id(gid)
            # a draw from the cursor on need not have entered yet
            if not stages and not cursor <= draw < IMPORTED_FROM:
                text = f"{gid} is in no stage"
                audit.damage.append(Damage(DamageKind.LOST, text, task=task, gid=gid))
            elif len(stages) > 1:
                audit.damage.append(_doubled(gid, ", ".join(stages)))

    def places(self, task: str, draw: int) -> list[str]:
        """Return the stages of a draw, from all structures at one instant; exactly one is right."""
        return self.places_of([group_id(task, draw)])[0]

    def places_of(self, gids: Sequence[str]) -> list[list[str]]:
        """Return the stages of each group, in one round trip.

        Each group is checked at one instant, but not all of them at the same one.
        """
        replies = self._store.call_many("check", [self._check_call(gid) for gid in gids])
        return [[str(stage) for stage in stages] for _ok, _recorded, *stages in replies]

    def _check_call(self, gid: str) -> tuple[SlotKeys, dict[str, Arg]]:
        task, draw = split_group_id(gid)
        return self._keys.slots(gid=gid, task=task), {"gid": gid, "draw": draw}

    def _check_holds(self) -> Iterator[Damage]:
        """Yield what is wrong with what workers hold, each worker at one instant."""
        keys = self._keys
        listed = self._store.each(
            "workers", [("ZRANGE", key, 0, -1) for key in (keys.leases, keys.workers)], "control"
        )
        workers = sorted({worker.decode() for members in listed for worker in members})
        calls = [(keys.slots(worker=worker), {"worker": worker}) for worker in workers]
        replies = self._store.call_many("check_holds", calls)
        for worker, (_ok, *faults) in zip(workers, replies, strict=True):
            for fault in faults:
                yield Damage(DamageKind.HOLDS, fault, keys.holds(worker))

    def _check_manifests(self, audit: Audit, ledger: BatchLedger) -> None:
        steps = ledger.steps()
        seen: Counter[str] = Counter()
        for step in range(steps.freed + 1, steps.taken + 1):
            manifest = ledger.manifest(step)
            if manifest is None and step > ledger.steps().freed:
                text = f"the manifest of {ledger.name} step {step} is gone"
                key = self._keys.batch(ledger.name, step)
                audit.damage.append(Damage(DamageKind.MANIFEST, text, key, step=step))
            gids = manifest.gids if manifest else []
            seen.update(gids)
            for gid, stages in zip(gids, self._stages_in_slices(gids), strict=True):
                # a group may be archived between the two reads, but never leaves a batch otherwise
                if stages not in (["taken"], ["archived"]):
                    where = f"batch {step} of {ledger.name}; {', '.join(stages) or 'nowhere'}"
                    audit.damage.append(_doubled(gid, where))
        audit.damage += [_doubled(gid, f"in {n} batches") for gid, n in seen.items() if n > 1]

    def _stages_in_slices(self, gids: Sequence[str]) -> Iterator[list[str]]:
        for start in range(0, len(gids), SLICE):
            yield from self.places_of(gids[start : start + SLICE])


def _doubled(gid: str, where: str) -> Damage:
    task, _ = split_group_id(gid)
    return Damage(DamageKind.DOUBLED, f"{gid} ({where})", task=task, gid=gid)


def _task(name: str, row: list[int]) -> TaskAccount:
    numbers = iter(row)
    waiting = sum(islice(numbers, len(LANES)))
    completed, aborted, expired = islice(numbers, len(POOLS))
    counters = dict(zip(_COUNTERS, islice(numbers, len(_COUNTERS)), strict=True))
    archived, filtered, dropped = numbers
    return TaskAccount(
        task=name,
        waiting=waiting,
        completed=completed,
        aborted=aborted,
        expired=expired,
        ended_bits=(archived, filtered, dropped),
        **counters,
    )
