"""A run on a server: the one handle for workers, producers, trainers and the command."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer.control.control import RunControl
from buffer.control.events import EventLog
from buffer.control.fleet import STAMP_FIELDS, Fleet, LimitsStamp, parse_stamp
from buffer.control.progress import ProduceProgress, read_progress
from buffer.control.receipts import Receipts
from buffer.control.task_status import TaskStops
from buffer.errors import GroupHeld, RunExists
from buffer.groups.dead_letters import DeadLetters
from buffer.groups.job_queue import JobQueue
from buffer.groups.replay_buffer import ReplayBuffer
from buffer.groups.skips import Skips
from buffer.ids import new_nonce
from buffer.janitor import Janitor
from buffer.ledger import memory
from buffer.ledger.account import Account
from buffer.ledger.ledger import BatchLedger
from buffer.ledger.trainer_opening import TrainerOpening
from buffer.limits import REGENERATING, SCHEMA, RunLimits
from buffer.maintenance.column_files import ColumnFolder
from buffer.manifest import NotReady
from buffer.observers import Observer
from buffer.query.language import TRUE, AllOf, parse
from buffer.query.scan import GroupScan
from buffer.redis.keys import EVERY_CONTROL, EVERY_META, Keys, run_of_key
from buffer.redis.payloads import PayloadStore
from buffer.redis.scripts import Advance, no_advance
from buffer.redis.store import RunContext, Store
from buffer.run.continuation import BY_HAND, Start, settings_for
from buffer.run.origin import Origin
from buffer.run.record import (
    limits_in,
    read_hash,
    read_meta,
    require_schema,
    without_meta,
    write_meta,
)
from buffer.run.settings import KeptSettings, LiveSettings, SettingsRecord, change_settings
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion

if TYPE_CHECKING:  # whole rooms that most processes never enter: methods import them
    from buffer.curation.group_export import Exported, GroupExport
    from buffer.curation.group_import import Imported
    from buffer.maintenance.regeneration import Regeneration
    from buffer.snapshot.folder import SnapshotFacts


class Run:
    """Holds all parts of one run; made by `create` or `open`.

    run.jobs                       # queues, claims, releases
    run.dead_letters, run.skips    # groups that failed, or were skipped
    run.buffer, run.payloads       # pools of finished groups, and their bytes
    run.ledger, run.evaluations    # batches that were taken and committed
    run.control, run.fleet         # modes and weights; workers
    run.account, run.memory        # counts by stage; payload bytes
    run.groups, run.events         # queries; the event stream
    run.janitor, run.columns       # sweeps; files of large columns
    """

    def __init__(self, store: Store, name: str, nonce: str, limits: RunLimits) -> None:
        self.store = store = store.at(Keys(name).meta, limits.wait_replicas)
        self.keys = Keys(name)
        self.name = name
        self.nonce = nonce
        # one object for all parts, and for nothing else: `adopt_limits` changes it in place
        self.limits = limits = limits.model_copy(deep=True)
        self.settings = SettingsRecord()  # of the config, and set since; of the version of `limits`
        self._limits_stamp = parse_stamp(None, None)
        self.changes: list[str] = []  # sentences: what `create` changed of an existing run
        self.columns = ColumnFolder.of_run(limits.columns, name, nonce)
        self.observers: list[Observer] = []  # they receive what this process does: append to it
        self.context = context = RunContext(store, self.keys, limits, self.observers)
        self.payloads = PayloadStore(store, self.keys, limits.compression)
        self.jobs = JobQueue(context)
        self.task_stops = TaskStops(store, self.keys)
        self.dead_letters = DeadLetters(context, self.payloads)
        self.skips = Skips(context)
        self.buffer = ReplayBuffer(context, self.payloads)
        self.ledger = BatchLedger(context)
        self.trainers = TrainerOpening(context, self.payloads, self.ledger)
        self.evaluations = BatchLedger(context, "eval")
        self.control = RunControl(context)
        self.fleet = Fleet(context)
        self.receipts = Receipts(context, self.fleet)
        self.events = EventLog(store, self.keys)
        self.account = Account(context)
        self.memory = memory.Memory(context)
        ledgers = (self.ledger, self.evaluations)
        self.janitor = Janitor(
            context, nonce, self.jobs, self.buffer, ledgers, self.payloads, self.columns
        )
        self.groups = GroupScan(context, ledgers)

    @classmethod
    def create(
        cls,
        store: Store,
        name: str,
        nonce: str,
        limits: RunLimits,
        weights: PolicyVersion = FIRST_WEIGHTS,
        path: str = "",
        origin: Origin | None = None,
        start: Start = BY_HAND,
        regeneration: Regeneration | None = None,
    ) -> Run:
        """Create a run, or continue it with these limits if it exists with this nonce.

        `nonce`: 32 random hex digits (`secrets.token_hex(16)`), which distinguish this run from
        others of its name: keep it, as `rolloutmq create` does. Workers start with `weights`, at
        `path`. `origin`: what its draws mean, if a config says so. `Run.changes` then lists the
        differences from the run so far; values of `Run.set` hold where `limits` is as in the last
        call. `regeneration`: clear first what the server has of the run; a trainer then opens it
        with the position of the checkpoint, and everything that this does not prove is generated
        again. Raises RunExists for another run of the name, ConfigError for limits or an origin
        that cannot continue it.
        """
        store = store.at(Keys(name).meta, limits.wait_replicas)
        keys = Keys(name)
        facts = {"nonce": nonce, "schema": SCHEMA, "weights": str(weights), "path": path}
        facts |= {"operation": new_nonce(), "continues": ""}
        reply = ["CONFLICT"]
        while reply[0] == "CONFLICT":
            remade_at = regeneration.position.step + 1 if regeneration else None
            settings = settings_for(store, keys, nonce, limits, origin, start, remade_at)
            if regeneration:
                regeneration.clear(store, keys, nonce, limits.role_timeout_ms)
                facts["continues"] = regeneration.position.run_nonce or nonce
            reopen = int(not start.is_done(settings.limits.steps))
            reply = store.call(
                "create_run",
                keys.slots(),
                {**facts, "version": settings.version, "reopen": reopen},
                tail_args=settings.to_meta(),
                durable=True,
            )
        if reply[0] == "DAMAGED":
            raise without_meta(keys)
        if reply[0] == "CLEARED":
            require_schema(name, {"schema": REGENERATING})
        if reply[0] == "EXISTS":
            _, other, created_ms, _ = reply
            raise RunExists(
                f"another run named {name!r} is on this server "
                f"(nonce {other[:8]}…, created at {created_ms} ms)",
                hint="choose another [run] name, or use the folder that belongs to it",
            )
        run = cls(store, name, nonce, settings.limits)
        run.changes = settings.changes
        run.settings = settings.record
        if not settings.version:
            run._limits_stamp = parse_stamp("0", facts["operation"])
        return run

    @classmethod
    def open(cls, store: Store, name: str) -> Run:
        """Open a run with its current limits. Raises RunNotFound, SchemaVersionError."""
        keys = Keys(name)
        store = store.at(keys.meta)
        meta, limits = read_meta(store, keys)
        run = cls(store, name, meta["nonce"], limits)
        run._adopt_settings(meta)
        return run

    def save(self, folder: Path, *, advance: Advance = no_advance) -> SnapshotFacts:
        """Write all of a run that rests into a new folder; see `buffer.snapshot.saver`.

        Raises SnapshotError, and leaves no folder, if groups run, or the run changes meanwhile.
        """
        from buffer.snapshot import saver

        return saver.save(self.context, self.columns.root, folder, advance)

    @classmethod
    def restore(
        cls,
        store: Store,
        folder: Path,
        *,
        name: str | None = None,
        columns: Path | None = None,
        advance: Advance = no_advance,
    ) -> Run:
        """Load a run that `save` wrote into a server that has no run of its name, and open it.

        `name` and `columns` (as in [run]) default to those that the run had. Raises SnapshotError,
        SchemaVersionError or RunExists, and leaves nothing on the server.
        """
        from buffer.snapshot.loader import SnapshotLoader

        loader = SnapshotLoader(store, folder, name, columns)
        loader.load(advance)
        return cls.open(store, loader.keys.run)

    def export(
        self,
        path: Path,
        *,
        task: str | None = None,
        status: str | None = None,
        where: object = TRUE,
        advance: Advance = no_advance,
    ) -> Exported:
        """Write living groups to a new .jsonl or .parquet file, one line per rollout.

        `where`: a query (buffer/query/language.py). Without it and `status`: completed groups.
        """
        node = parse(where)
        if status or node == TRUE:
            node = AllOf((node, parse({"status": status or "completed"})))
        tasks = [task] if task else list(self.limits.tasks)
        return self._exporter().write(path, tasks, node, advance)

    def export_archived(self, path: Path, *, advance: Advance = no_advance) -> Exported:
        """Write the archived batches that were not exported yet to a new file, or into a folder.

        They are marked as exported once the file is on disk, which frees them under
        `retain_until_exported`. After a crash in between, the next file holds them again.
        """
        done = self._exporter().write_archived(path, advance)
        if done.steps:
            self.ledger.archive.forget(exported=done.steps[-1])
        return done

    def _exporter(self) -> GroupExport:
        from buffer.curation.group_export import GroupExport

        return GroupExport(self.store, self.keys, self.buffer, self.ledger)

    def import_groups(
        self,
        path: Path,
        *,
        task: str | None = None,
        from_line: int = 1,
        advance: Advance = no_advance,
    ) -> Imported:
        """Put all groups of a .jsonl or .parquet file into the pools, or raise DatasetError."""
        from buffer.curation.group_import import GroupImport

        reader = GroupImport(self.context, self.payloads)
        return reader.read(path, task, from_line=from_line, advance=advance)

    @staticmethod
    def names(store: Store, *, damaged: bool = False) -> list[str]:
        """Return the names of the runs on a server. Walks the key space: never for a hot path.

        `damaged`: also of runs that lost their `meta` and cannot be opened.
        """
        patterns = (EVERY_META, EVERY_CONTROL) if damaged else (EVERY_META,)

        def scan() -> set[bytes]:
            return {
                key
                for _, client in store.servers.masters()
                for pattern in patterns
                for key in client.scan_iter(pattern, count=1000)
            }

        return sorted({run_of_key(key.decode()) for key in store.retrying("runs", scan)})

    def refresh_limits(self) -> bool:
        """Adopt limits that were changed on the server; return whether any were. One short read."""
        return self.poll()[0]

    def poll(self) -> tuple[bool, memory.MemoryUse]:
        """Refresh the limits, and return the run's use of memory, too, in one round trip."""
        limits = ("HMGET", self.keys.meta, *STAMP_FIELDS)
        stamp, held = self.store.send(
            "limits", [limits, ("HMGET", self.keys.bytes, *memory.FIELDS)]
        )
        changed = self.adopt_limits(parse_stamp(*stamp))
        return changed, self.memory.use(memory.ByteCount.parse(self.keys.bytes, held))

    def adopt_limits(self, stamp: LimitsStamp) -> bool:
        """Read the limits if the server has another stamp; return whether it has."""
        if stamp == self._limits_stamp:
            return False
        meta = read_hash(self.store, "limits", self.keys.meta)
        # if the run is gone, or another one, the next call that needs it reports that
        if meta.get("nonce") == self.nonce:
            self.limits.adopt(limits_in(self.keys.meta, meta))
            self._adopt_settings(meta)
        return True

    def _adopt_settings(self, meta: Mapping[str, str]) -> None:
        self.settings = SettingsRecord.from_meta(meta)
        self._limits_stamp = parse_stamp(meta.get("limits_version"), meta.get("limits_op"))

    def set(
        self,
        settings: LiveSettings,
        *,
        restored: Collection[str] = (),
        by: str = "",
        folder: Path | None = None,
    ) -> dict[str, tuple[Any, Any]]:
        """Change settings while the run continues; return (before, after) of each by its name.

        They belong to the run from then on (`buffer/run/settings.py`). `restored`:
        settings that get the value of the config again. `by`: who makes the change. `folder`: the
        run's, which keeps the change for a server that loses everything. Raises ConfigError.
        """
        operation = new_nonce()
        while True:
            self.refresh_limits()
            taken = self.ledger.steps().taken
            fields, changed = change_settings(
                self.limits, self.settings, settings, restored, taken, by
            )
            version, _ = self._limits_stamp
            if write_meta(self.store, self.keys, operation, version, fields):
                self.refresh_limits()
                if folder and (folder / "run.json").is_file():
                    KeptSettings(folder, self.nonce).keep(self.settings)
                return changed

    def take_batch(
        self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True
    ) -> dict[str, list[RolloutGroup]] | NotReady:
        """Take the groups of train step `step`, and return them by task.

        `counts`: groups of each task, of which it takes all or none (NotReady); without `strict`,
        those that are ready. `nonce` is that of the open trainer. A step that was taken before is
        returned as it was (I5). Raises Fenced, LedgerError, PayloadMissing or WireError;
        `RolloutConsumer` instead waits, and quarantines unreadable groups.
        """
        answer = self.ledger.take(nonce, step, counts, strict=strict)
        if isinstance(answer, NotReady):
            return answer
        groups = self.buffer.load(answer)
        return {task: [group for group in groups if group.task == task] for task in counts}

    def delete(self, which: str | Mapping[str, Any]) -> int:
        """Drop a group by its gid, or all groups in pools that match a query; return how many.

        A single group may also wait or be dead. Raises GroupHeld if it runs, is in a batch, or has
        ended otherwise, and QueryError for a wrong query.
        """
        if isinstance(which, str):
            return int(self.jobs.drop(which) != "dropped")
        deleted = 0
        for record in self.groups.find({"$and": [{"stage": "pool"}, which]}):
            with contextlib.suppress(GroupHeld):
                deleted += self.jobs.drop(record.gid) != "dropped"
        return deleted

    def read_progress(self, tasks: Iterable[str] | None = None) -> ProduceProgress:
        """Return the progress of these tasks (default: those of training). Raises KeyError."""
        names = self.limits.training_tasks if tasks is None else list(tasks)
        thresholds = {name: self.limits.threshold(name) for name in names}
        return read_progress(self.store, self.keys, thresholds)

    def progress(self, task: str) -> dict[str, str]:
        """Return the account and counters of a task as the server has them."""
        return read_hash(self.store, "progress", self.keys.progress(task))

    def record(self, gid: str) -> dict[str, str]:
        """Return the record of a group; empty if it has ended or never was."""
        return read_hash(self.store, "record", self.keys.group(gid))
