"""The account: every group is in exactly one stage, and nothing is trained twice (I1, I6).

One script returns all totals at one instant, from structures and from counters; both must agree
with `enqueued + put + imported`. Then each group is checked in all structures at one instant,
because paging through two live sets would report false losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer.errors import ConfigError, RunDamaged, RunError, StoreError, StoreUnavailable
from buffer.ids import ENDS, NAME, group_id
from buffer.ledger.key_check import KeyCheck
from buffer.ledger.ledger import BatchLedger
from buffer.ledger.memory import ByteCount, Memory
from buffer.ledger.record_check import RecordCheck
from buffer.ledger.stages import StageReader, doubled, stage_faults
from buffer.ledger.tokens import TokenAccount, read_tokens
from buffer.redis.key_fields import Damage, text_fields, wrong_fields
from buffer.redis.keys import Keys
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import RunContext

STAGES = (
    *("waiting", "running", "completed", "aborted", "expired", "taken", "archived", "dead"),
    *("filtered", "dropped", "skipped"),
)
"""Where a group can be: in exactly one of these. A group in a pool is named by its status."""


@dataclass(frozen=True, slots=True)
class TaskAccount:
    """The groups of a task, in the order of the numbers that the script `totals` returns."""

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
    skipped: int
    enqueued: int
    put: int
    imported: int
    cursor: int
    reentered: int  # groups that entered before the cursor, after the server lost data
    highest_draw: int
    target: int
    consumed: int
    archived_bits: int
    filtered_bits: int
    dropped_bits: int
    skipped_bits: int

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
        return self.put + self.imported

    def faults(self, keys: Keys) -> Iterator[Damage]:
        task, progress = self.task, keys.progress(self.task)
        in_stages = sum(self.stages.values())
        if in_stages != self.total:
            added = ((self.put, "put"), (self.imported, "imported"))
            counts = [f"{self.enqueued} enqueued", *(f"{n} {how}" for n, how in added if n)]
            text = f"{task}: {' and '.join(counts)}, but {in_stages} in all stages"
            yield Damage(text, progress)
        if self.enqueued != self.cursor + self.reentered:
            text = f"{task}: {self.enqueued} enqueued, but the cursor is at {self.cursor}"
            text += f", {self.reentered} ahead of it" if self.reentered else ""
            yield Damage(text, progress)
        for end in ENDS:
            counted, bits = getattr(self, end), getattr(self, f"{end}_bits")
            if bits != counted:
                text = f"{task}: {counted} counted as {end}, {bits} in the bitmap"
                yield Damage(text, keys.ended(task, end))


@dataclass(slots=True)
class FsckReport:
    tasks: list[TaskAccount]
    leases: int
    bytes: ByteCount
    checked: int = 0
    damage: list[Damage] = field(default_factory=list)  # all faults; the properties below sort them

    @property
    def clean(self) -> bool:
        return not self.damage

    @property
    def faults(self) -> list[str]:
        """Return a sentence for each fault beside lost and doubled groups."""
        return [found.text for found in self.damage if found.kind == "fault"]

    @property
    def lost(self) -> list[str]:
        return [found.gid for found in self.damage if found.kind == "lost"]

    @property
    def doubled(self) -> list[str]:
        """Return the groups that are in two stages or batches, and in which."""
        return [found.text for found in self.damage if found.kind == "doubled"]

    def collect(self, what: str, damage: Iterable[Damage]) -> None:
        """Add the damage that a check yields, or that ends it."""
        try:
            self.damage.extend(damage)
        except StoreUnavailable:
            raise
        except (RunError, StoreError, ConfigError) as error:
            self.damage.append(Damage(f"{what} could not be checked: {error.message}"))


class Account:
    """Reads the account of one run; changes nothing."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._store, self._keys, self._limits, _ = context

    def totals(self) -> FsckReport:
        """Count all groups of all tasks at one instant. O(tasks)."""
        keys = self._keys
        names = list(self._limits.tasks)
        reply = self._store.call(
            "totals", keys.slots(), {}, [keys.slots(task=task) for task in names]
        )
        leases, letters, came, went, *rows = (int(number) for number in reply[1:])
        width = len(rows) // max(1, len(names))
        each = (rows[i * width : (i + 1) * width] for i in range(len(names)))
        tasks = [TaskAccount(name, *row) for name, row in zip(names, each, strict=True)]
        report = FsckReport(tasks, leases=leases, bytes=ByteCount(came, went))
        for task in tasks:
            report.damage.extend(task.faults(keys))
        running = sum(task.running for task in tasks)
        dead = sum(task.dead for task in tasks)
        if running != leases:
            text = f"{running} groups counted as running, workers hold {leases}"
            report.damage.append(Damage(text, keys.leases))
        if dead != letters:
            text = f"{dead} groups counted as dead, {letters} dead letters"
            report.damage.append(Damage(text, keys.dead))
        return report

    def tokens(self) -> dict[str, TokenAccount]:
        """Return the account of sampled tokens of each task, all as of one instant."""
        return read_tokens(self._store, self._keys, list(self._limits.tasks))

    def stages(self, task: str, draw: int) -> list[str]:
        """Return the stages of a draw, from all structures at one instant; exactly one is right."""
        return self.stages_of([group_id(task, draw)])[0]

    def stages_of(self, gids: Sequence[str]) -> list[list[str]]:
        """Return the stages of each group, read at one instant for each, but not for all."""
        return [row.stages for row in StageReader(self._context).rows(gids)]

    # -- fsck ------------------------------------------------------------------------------------

    def fsck(self, advance: Callable[[int, int], object] = lambda done, total: None) -> FsckReport:
        """Check every key: its name, type and fields, every draw, manifest, record, lease and byte.

        Works on a live run, and no fault ends it. `advance` gets the draws checked, and all.
        """
        report = FsckReport([], leases=0, bytes=ByteCount(0, 0))
        keys = KeyCheck(self._context)
        groups = RecordCheck(self._context, keys)
        report.damage.extend(keys.damage())
        report.collect("the fields", keys.fields())
        report.collect("the totals", self._check_totals(report, groups))
        report.collect("the groups", self._check_groups(groups, advance))
        report.checked = groups.checked
        for name, what in (("train", "training"), ("eval", "evaluations")):
            report.collect(f"the manifests of {what}", self._check_manifests(name, groups))
        report.collect("what workers hold", self._check_leases(keys))
        return report

    def spot_check(self) -> list[Damage]:
        """Check the ledger of training and the newest draws of each task, at a constant cost."""
        report = FsckReport([], leases=0, bytes=ByteCount(0, 0))
        key = self._keys.ledger("train")
        fields: Any = self._store.ask("ledger", "HGETALL", key)
        report.collect("the ledger", wrong_fields("ledger", key, text_fields(fields)))
        for task in self.totals().tasks:
            newest = range(max(0, task.drawn - 200), task.drawn)
            rows = StageReader(self._context).rows([group_id(task.task, n) for n in newest])
            faults = (fault for row in rows for fault in stage_faults(row, task.cursor))
            report.collect(f"the draws of {task.task}", faults)
        return report.damage

    def _check_totals(self, report: FsckReport, groups: RecordCheck) -> Iterator[Damage]:
        """Count all groups into `report`, and yield the faults of counts."""
        totals = self.totals()
        report.tasks, report.leases, report.bytes = totals.tasks, totals.leases, totals.bytes
        yield from totals.damage
        for task in totals.tasks:
            if sum(task.stages.values()) != task.total:
                yield from groups.strangers(task.task)

    def _check_leases(self, found: KeyCheck) -> Iterator[Damage]:
        """Yield the faults of what workers hold, each worker at one instant."""
        keys = self._keys
        listed = self._store.send(
            "workers", [("ZRANGE", key, 0, -1) for key in (keys.leases, keys.workers)]
        )
        known = {worker.decode(errors="replace") for members in listed for worker in members}
        workers = sorted(filter(NAME.fullmatch, known | found.of_kind("leased").keys()))
        calls = [
            ScriptCall("check_leased", keys.slots(worker=name), {"worker": name})
            for name in workers
        ]
        replies = self._store.send("check_leased", calls)
        for worker, (_ok, *faults) in zip(workers, replies, strict=True):
            yield from (Damage(fault, keys.leased(worker)) for fault in faults)
        for worker in sorted(known - set(workers)):
            text = f"{worker!r} in {keys.leases} or {keys.workers} is no worker"
            yield Damage(text, keys.leases)

    def _check_manifests(self, name: str, groups: RecordCheck) -> Iterator[Damage]:
        """Yield the faults of batches that are not archived, and of retained ones."""
        ledger = BatchLedger(self._context, name)
        oldest = ledger.archive.steps().start
        steps = ledger.steps()
        seen: Counter[str] = Counter()
        for step in range(oldest, steps.taken + 1):
            key = self._keys.batch(name, step)
            try:
                manifest = ledger.manifest(step)
            except RunDamaged as error:
                yield Damage(error.message, key)
                continue
            # archived ones are gone after a loss of data; their bytes show if they should not be
            if (manifest is None or manifest.archived) and step > ledger.steps().freed:
                is_gone = manifest is None
                text = "is gone" if is_gone else f"is archived, and {ledger.steps()} says otherwise"
                text = f"the manifest of {name} step {step} {text}"
                yield Damage(text, key if is_gone else self._keys.ledger(name))
            # the oldest archived batch may be freed in part
            if manifest and not manifest.is_complete and step != oldest:
                text = f"the manifest of {name} step {step} lacks groups: {manifest.header}"
                yield Damage(text, key)
            if manifest and step > steps.freed:
                seen.update(manifest.gids)
                unsure = groups.taken.lacks(manifest.gids)
                for gid, stages in zip(unsure, self.stages_of(unsure), strict=True):
                    # archived between the two reads; a group never leaves a batch otherwise
                    if stages not in (["taken"], ["archived"]):
                        where = ", ".join(stages) or "nowhere"
                        yield doubled(gid, f"batch {step} of {name}; {where}")
        yield from (doubled(gid, f"in {n} batches") for gid, n in seen.items() if n > 1)

    def _check_groups(
        self, groups: RecordCheck, advance: Callable[[int, int], object]
    ) -> Iterator[Damage]:
        """Yield the faults of groups, their bytes, and the counts of bytes and sampled tokens.

        On a live run a count is a range: what comes or goes meanwhile may be missed.
        """
        memory = Memory(self._context)
        before, then = memory.count(), self.tokens()
        yield from groups.damage(advance)
        yield from groups.orphans()
        after = memory.count()
        for task, now in self.tokens().items():
            sampled, made = now.total - now.reported, groups.made[task]
            known = then[task].total - then[task].reported
            least, most = known - now.ended, sampled - then[task].ended
            if not least <= made <= most:
                counted = known - then[task].ended
                text = f"{task}: {counted} sampled tokens are counted in groups, "
                text += f"but their records add up to {made} ({least} to {most} expected)"
                yield Damage(text, self._keys.progress(task))
        least, most = before.came - after.went, after.came - before.went
        if not least <= groups.weight <= most:
            text = (
                f"{before.held} payload bytes are counted, but the records add up to "
                f"{groups.weight} ({least} to {most} expected)"
            )
            yield Damage(text, self._keys.bytes)
