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
from typing import Any

from buffer.errors import ConfigError, RunDamaged, RunError, StoreError, StoreUnavailable
from buffer.ledger.field_check import FieldCheck
from buffer.ledger.key_check import FoundKey, KeyCheck
from buffer.ledger.ledger import BatchLedger
from buffer.ledger.memory import ByteCount, Memory
from buffer.ledger.record_check import RecordCheck
from buffer.model.damage import Damage, DamageKind
from buffer.model.ids import ENDS, IMPORTED_FROM, LANES, NAME, POOLS, group_id, split_group_id
from buffer.model.limits import RunLimits
from buffer.redis.key_fields import text_fields, wrong_fields
from buffer.redis.keys import Keys, SlotKeys
from buffer.redis.scripts import Arg
from buffer.redis.store import Store

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
    "reentered",
    "highest_draw",
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
    reentered: int
    """groups that entered although the cursor is still before them, after the server lost data"""
    highest_draw: int
    target: int
    consumed: int
    ended_bits: tuple[int, int, int]
    """bits in the bitmaps of ENDS"""

    @property
    def stages(self) -> dict[str, int]:
        """Return the groups by stage; their sum must equal `total`."""
        return {name: getattr(self, name) for name in STAGES}

    @property
    def drawn(self) -> int:
        """Return the first draw of the data set after all that ever entered."""
        return max(self.cursor, self.highest_draw)

    @property
    def total(self) -> int:
        """Return how many groups ever entered: drawn from the data set, put, or imported."""
        return self.enqueued + self.added_by_hand

    @property
    def added_by_hand(self) -> int:
        """Return how many groups entered that were not drawn from the data set."""
        return self.put + self.imported

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield (field of `progress`, sentence) for each pair of counts that disagree."""
        total = sum(self.stages.values())
        if total != self.total:
            put = f" and {self.put} put" if self.put else ""
            imported = f" and {self.imported} imported" if self.imported else ""
            entered = f"{self.enqueued} enqueued{put}{imported}"
            yield "enqueued", f"{self.task}: {entered}, but {total} in all stages"
        if self.enqueued != self.cursor + self.reentered:
            cursor = (
                f"{self.cursor}, {self.reentered} ahead of it" if self.reentered else self.cursor
            )
            yield "cursor", f"{self.task}: {self.enqueued} enqueued, but the cursor is at {cursor}"
        for end, bits in zip(ENDS, self.ended_bits, strict=True):
            counted = getattr(self, end)
            if bits != counted:
                yield end, f"{self.task}: {counted} counted as {end}, {bits} in the bitmap"


@dataclass(slots=True)
class FsckReport:
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

    def totals(self) -> FsckReport:
        """Count all groups of all tasks at one instant. O(tasks)."""
        keys = self._keys
        names = list(self._limits.tasks)
        reply = self._store.call(
            "totals", keys.slots(), {}, [keys.slots(task=task) for task in names]
        )
        leases, letters, came, went, *rows = (int(number) for number in reply[1:])
        tasks = [_task(name, rows[i * _WIDTH : (i + 1) * _WIDTH]) for i, name in enumerate(names)]
        audit = FsckReport(tasks, leases=leases, bytes=ByteCount(came, went))
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
        for name, text in task.faults():
            is_end = name in ENDS
            key = self._keys.ended(task.task, name) if is_end else self._keys.progress(task.task)
            yield Damage(DamageKind.COUNT, text, key, field=name, task=task.task)

    def fsck(self) -> FsckReport:
        """Check every key: its name, type and fields, every draw, manifest, record, lease and byte.

        Works on a live run, and never ends because of what it finds.
        """
        store, keys, limits = self._store, self._keys, self._limits
        audit = FsckReport([], leases=0, bytes=ByteCount(0, 0))
        key_check = KeyCheck(store, keys, limits)
        found = list(key_check.walk())
        audit.damage += key_check.damage(found)
        checks = {
            "the fields": FieldCheck(store, keys, limits, found).damage(),
            "the totals": self._check_draws(audit),
            "the manifests of training": self._check_manifests("train"),
            "the manifests of evaluations": self._check_manifests("eval"),
            "what workers hold": self._check_holds(found),
            "the records": self._check_records(found),
        }
        for what, damage in checks.items():
            _collect(audit, what, damage)
        return audit

    def spot_check(self) -> list[Damage]:
        """Check the ledger of training and the newest draws of each task.

        The cost does not grow with the run.
        """
        audit = FsckReport([], leases=0, bytes=ByteCount(0, 0))
        key = self._keys.ledger("train")
        _collect(audit, "the ledger", wrong_fields("ledger", key, self._ledger_fields(key)))
        for task in self.totals().tasks:
            newest = range(max(0, task.drawn - SLICE), task.drawn)
            gids = [group_id(task.task, draw) for draw in newest]
            _collect(audit, f"the draws of {task.task}", self._check(gids, task.cursor))
        return audit.damage

    def _ledger_fields(self, key: str) -> dict[str, str]:
        found: Any = self._store.retrying("ledger", lambda: self._store.control.hgetall(key))
        return text_fields(found)

    def _check_draws(self, audit: FsckReport) -> Iterator[Damage]:
        """Count all groups into `audit`, and yield what is wrong with the counts and draws."""
        totals = self.totals()
        audit.tasks, audit.leases, audit.bytes = totals.tasks, totals.leases, totals.bytes
        yield from totals.damage
        for task in totals.tasks:
            draws = chain(
                range(task.drawn), range(IMPORTED_FROM, IMPORTED_FROM + task.added_by_hand)
            )
            while gids := [group_id(task.task, draw) for draw in islice(draws, SLICE)]:
                audit.checked += len(gids)
                yield from self._check(gids, task.cursor)
            if sum(task.stages.values()) != task.total:
                yield from RecordCheck(self._store, self._keys, self._limits).strangers(task.task)

    def _check(self, gids: Sequence[str], cursor: int) -> Iterator[Damage]:
        for gid, stages in zip(gids, self.stages_of(gids), strict=True):
            task, draw = split_group_id(gid)
            # a draw from the cursor on need not have entered yet
            if not stages and not cursor <= draw < IMPORTED_FROM:
                key = self._keys.group(gid)
                yield Damage(DamageKind.LOST, f"{gid} is in no stage", key, task=task, gid=gid)
            elif len(stages) > 1:
                yield _doubled(gid, ", ".join(stages))

    def stages(self, task: str, draw: int) -> list[str]:
        """Return the stages of a draw, from all structures at one instant; exactly one is right."""
        return self.stages_of([group_id(task, draw)])[0]

    def stages_of(self, gids: Sequence[str]) -> list[list[str]]:
        """Return the stages of each group, in one round trip.

        Each group is checked at one instant, but not all of them at the same one.
        """
        replies = self._store.call_many("check", [self._check_call(gid) for gid in gids])
        return [[str(stage) for stage in stages] for _ok, _recorded, *stages in replies]

    def _check_call(self, gid: str) -> tuple[SlotKeys, dict[str, Arg]]:
        task, draw = split_group_id(gid)
        return self._keys.slots(gid=gid, task=task), {"gid": gid, "draw": draw}

    def _check_holds(self, found: Sequence[FoundKey]) -> Iterator[Damage]:
        """Yield what is wrong with what workers hold, each worker at one instant."""
        keys = self._keys
        listed = self._store.each(
            "workers", [("ZRANGE", key, 0, -1) for key in (keys.leases, keys.workers)], "control"
        )
        known = {worker.decode(errors="replace") for members in listed for worker in members}
        holders = {each.name.removeprefix("holds:") for each in found if each.kind == "holds"}
        workers = sorted(filter(NAME.fullmatch, known | holders))
        calls = [(keys.slots(worker=worker), {"worker": worker}) for worker in workers]
        replies = self._store.call_many("check_holds", calls)
        for worker, (_ok, *faults) in zip(workers, replies, strict=True):
            for fault in faults:
                yield Damage(DamageKind.HOLDS, fault, keys.holds(worker))
        for worker in sorted(known - set(workers)):
            text = f"{worker!r} in {keys.leases} or {keys.workers} is no worker"
            yield Damage(DamageKind.INDEX, text, keys.leases, field=worker)

    def _check_manifests(self, name: str) -> Iterator[Damage]:
        """Yield what is wrong with the batches that are not archived, and those that are kept."""
        ledger = BatchLedger(self._store, self._keys, self._limits, name)
        archived = ledger.archive.steps()
        steps = ledger.steps()
        seen: Counter[str] = Counter()
        for step in range(archived.start, steps.taken + 1):
            key = self._keys.batch(name, step)
            try:
                manifest = ledger.manifest(step)
            except RunDamaged as error:
                yield Damage(DamageKind.MANIFEST, error.message, key, step=step)
                continue
            # archived ones are gone after a loss of data; their bytes show if they should not be
            if manifest is None and step > ledger.steps().freed:
                text = f"the manifest of {name} step {step} is gone"
                yield Damage(DamageKind.MANIFEST, text, key, step=step)
            if manifest and manifest.archived and step > ledger.steps().freed:
                text = f"batch {step} of {name} is archived, and {ledger.steps()} says otherwise"
                yield Damage(DamageKind.STEPS, text, self._keys.ledger(name))
            # the oldest archived batch may be freed in part
            if manifest and not manifest.is_complete and step != archived.start:
                text = f"the manifest of {name} step {step} lacks groups: {manifest.header}"
                yield Damage(DamageKind.MANIFEST, text, key, step=step)
            if manifest is None or step <= steps.freed:
                continue
            seen.update(manifest.gids)
            stages_of = self._stages_in_slices(manifest.gids)
            for gid, stages in zip(manifest.gids, stages_of, strict=True):
                # a group may be archived between the two reads, but never leaves a batch otherwise
                if stages not in (["taken"], ["archived"]):
                    yield _doubled(gid, f"batch {step} of {name}; {', '.join(stages) or 'nowhere'}")
        yield from (_doubled(gid, f"in {n} batches") for gid, n in seen.items() if n > 1)

    def _check_records(self, found: Sequence[FoundKey]) -> Iterator[Damage]:
        """Yield what is wrong with records and payloads, and if the count of bytes is.

        On a live run the count is a range: bytes that were held throughout are seen once, those
        that came or went in between once or never.
        """
        memory = Memory(self._store, self._keys, self._limits)
        before = memory.count()
        check = RecordCheck(self._store, self._keys, self._limits)
        yield from check.damage()
        # in a cluster, payloads may outlive what a lost node knew of them
        if not self._keys.spread:
            yield from check.orphans(each.key for each in found if each.kind == "payload")
        after = memory.count()
        least, most = before.came - after.went, after.came - before.went
        if not least <= check.weight <= most:
            text = (
                f"{before.held} payload bytes are counted, but the records add up to "
                f"{check.weight} ({least} to {most} expected)"
            )
            yield Damage(DamageKind.BYTES, text, self._keys.bytes)

    def _stages_in_slices(self, gids: Sequence[str]) -> Iterator[list[str]]:
        for start in range(0, len(gids), SLICE):
            yield from self.stages_of(gids[start : start + SLICE])


def _collect(audit: FsckReport, what: str, damage: Iterator[Damage]) -> None:
    """Add what a check yields; damage that ends the check itself is reported, too."""
    try:
        audit.damage.extend(damage)
    except StoreUnavailable:
        raise
    except (RunError, StoreError, ConfigError) as error:
        text = f"{what} could not be checked: {error.message}"
        audit.damage.append(Damage(DamageKind.UNCHECKED, text))


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
