"""A run on a server: the one handle through which workers, producers, trainers and the command see
it.

store = Store(url)
run = Run.open(store, "demo")
run.jobs · run.halts · run.dead_letters · run.buffer · run.ledger · run.control · run.fleet · run.receipts ·
run.account · run.payloads run.groups · run.janitor · run.media · run.events
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from buffer.batches import memory
from buffer.batches.account import Account
from buffer.batches.ledger import BatchLedger
from buffer.batches.trainer_opening import TrainerOpening
from buffer.control.control import RunControl
from buffer.control.event_log import EventLog
from buffer.control.fleet import Fleet
from buffer.control.live_settings import LiveSettings, differences
from buffer.control.progress import ProduceProgress, read_progress
from buffer.control.receipts import Receipts
from buffer.control.task_status import Halts
from buffer.curation.group_export import Exported, GroupExport
from buffer.curation.group_import import GroupImport, Imported
from buffer.errors import RunExists, RunNotFound, SchemaVersionError
from buffer.groups.dead_letters import DeadLetters
from buffer.groups.job_queue import JobQueue
from buffer.maintenance.janitor import Janitor
from buffer.model.ids import new_nonce
from buffer.model.limits import LOADING, REMOVING, SCHEMA, RunLimits
from buffer.model.rollout import PolicyVersion
from buffer.query.language import TRUE, AllOf, parse
from buffer.query.scan import GroupScan
from buffer.replay_buffer import ReplayBuffer
from buffer.snapshot.folder import SnapshotFacts
from buffer.snapshot.loader import SnapshotLoader
from buffer.snapshot.saver import SnapshotSaver
from buffer.store.keys import EVERY_META, Keys, run_of_meta
from buffer.store.media_folder import MediaFolder
from buffer.store.payloads import PayloadStore
from buffer.store.replies import Advance, no_advance, unfenced
from buffer.store.store import Store


class Run:
    """All parts of one run; make it with `create` or `open`."""

    def __init__(self, store: Store, name: str, nonce: str, limits: RunLimits) -> None:
        self.store = store = store.at(Keys(name).meta, limits.wait_replicas)
        self.keys = Keys(name, spread=store.in_cluster)
        # one object for all parts, and nobody else's: `refresh_limits` changes it in place
        self.name = name
        self.nonce = nonce
        self.limits = (limits := limits.model_copy(deep=True))
        # a server that lost something counts from an older number again: the change's nonce tells
        # the two apart
        self._limits_stamp = _stamp(None, None)
        self.media = MediaFolder(Path(limits.media), name, nonce) if limits.media else None
        self.payloads = PayloadStore(store, self.keys, limits.compression)
        self.jobs = JobQueue(store, self.keys, limits)
        self.halts = Halts(store, self.keys)
        self.dead_letters = DeadLetters(store, self.keys)
        self.buffer = ReplayBuffer(store, self.keys, limits, self.payloads)
        self.ledger = BatchLedger(store, self.keys, limits)
        self.trainers = TrainerOpening(store, self.keys, limits, self.payloads, self.ledger)
        self.evaluations = BatchLedger(store, self.keys, limits, "eval")
        self.control = RunControl(store, self.keys, limits)
        self.fleet = Fleet(store, self.keys, limits)
        self.receipts = Receipts(store, self.keys, limits, self.fleet)
        self.events = EventLog(store, self.keys)
        self.account = Account(store, self.keys, limits)
        self.memory = memory.Memory(store, self.keys, limits)
        ledgers = (self.ledger, self.evaluations)
        self.janitor = Janitor(
            store, self.keys, nonce, limits, self.jobs, ledgers, self.payloads, self.media
        )
        self.groups = GroupScan(store, self.keys, limits, ledgers)

    @classmethod
    def create(
        cls,
        store: Store,
        name: str,
        nonce: str,
        limits: RunLimits,
        weights: PolicyVersion,
        path: str,
    ) -> Run:
        """Make the run, or open it where this very one (by nonce) exists. RunExists for another one
        of the name.
        """
        keys = Keys(name)
        store = store.at(keys.meta, limits.wait_replicas)
        reply = store.call(
            "create_run",
            keys.slots(),
            {"nonce": nonce, "schema": SCHEMA, "weights": str(weights), "path": path},
            tail_args=limits.to_meta(),
            durable=True,
        )
        if reply[0] == "EXISTS":
            raise RunExists(
                f"another run named {name!r} is on this server (nonce {reply[1][:8]}…, made at {reply[2]} ms)",
                hint="choose another [run] name, or use the folder that belongs to it",
            )
        run = cls(store, name, nonce, limits)
        if run.media:
            run.media.claim()
        return run

    @classmethod
    def open(cls, store: Store, name: str) -> Run:
        """The run of that name, with the limits it was made with. RunNotFound where there is none."""
        keys = Keys(name)
        store = store.at(keys.meta)
        raw: Any = store.retrying("open run", lambda: store.control.hgetall(keys.meta))
        meta = {k.decode(): v.decode() for k, v in raw.items()}
        if not meta:
            raise RunNotFound(
                f"there is no run {name!r} on this server",
                hint="`rolloutmq status` without a name lists the runs",
            )
        if meta.get("schema") == LOADING:
            raise RunNotFound(
                f"run {name!r} is being resumed from a snapshot, or that was interrupted",
                hint="wait for its end; `rolloutmq resume` clears away what an interrupted one left",
            )
        if meta.get("schema") == REMOVING:
            raise RunNotFound(
                f"run {name!r} is being removed, or that was interrupted",
                hint=f"`rolloutmq runs --delete {name} --yes` goes on",
            )
        if meta.get("schema") != SCHEMA:
            raise SchemaVersionError(
                f"run {name!r} has schema {meta.get('schema')}; this version knows {SCHEMA}"
            )
        run = cls(store, name, meta["nonce"], RunLimits.from_meta(meta))
        run._limits_stamp = _stamp(meta.get("limits_version"), meta.get("limits_op"))
        return run

    def save(
        self, folder: Path, *, attempts: int = 5, advance: Advance = no_advance
    ) -> SnapshotFacts:
        """Write all of the run into a new folder, as of one instant; see `buffer.snapshot.saver`.

        The run may go on meanwhile, but its index must stand still for one of `attempts` copies of
        it: SnapshotError otherwise, and no folder.
        """
        saver = SnapshotSaver(self.store, self.keys, self.limits, self.payloads, self.media)
        return saver.save(folder, attempts, advance)

    @classmethod
    def resume(
        cls,
        store: Store,
        folder: Path,
        *,
        name: str | None = None,
        media: Path | None = None,
        advance: Advance = no_advance,
    ) -> Run:
        """The run that `save` wrote, on a server that has none of that `name` (default: the one it
        had).

        `media`: a new folder for its files, where it has one; default: where it was.
        Raises SnapshotError, SchemaVersionError or RunExists; the server is then as it was before.
        """
        loader = SnapshotLoader(store, folder, name, media)
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
        """Write living groups to a new .jsonl or .parquet file, one line per rollout: those of that
        status (without a question: completed ones) that `where` asks for
        (buffer/query/language.py).
        """
        node = parse(where)
        if status or node == TRUE:
            node = AllOf((node, parse({"status": status or "completed"})))
        tasks = [task] if task else list(self.limits.tasks)
        return self._exporter().write(path, tasks, node, advance)

    def export_archived(self, path: Path, *, advance: Advance = no_advance) -> Exported:
        """Write the archived batches that nobody has exported yet to a new file, and say so once it
        is on disk: under `retain_until_exported` that frees them. A crash in between means that the
        next file holds them again.
        """
        done = self._exporter().write_archived(path, advance)
        if done.steps:
            self.ledger.archive.forget(exported=done.steps[-1])
        return done

    def _exporter(self) -> GroupExport:
        return GroupExport(self.store, self.keys, self.buffer, self.ledger)

    def import_groups(
        self,
        path: Path,
        *,
        task: str | None = None,
        from_line: int = 1,
        advance: Advance = no_advance,
    ) -> Imported:
        """Put the groups of a .jsonl or .parquet file into the pools. DatasetError, and nothing
        imported, if a line is wrong; see `buffer.curation.group_import`.
        """
        reader = GroupImport(
            self.store, self.keys, self.limits, self.payloads, self.buffer.order_function
        )
        return reader.read(path, task, from_line=from_line, advance=advance)

    @staticmethod
    def names(store: Store) -> list[str]:
        """The runs on a server. Walks the key space in slices: for people, never for a hot path."""

        def scan() -> list[bytes]:
            return [
                key
                for _, client in store.servers.masters()
                for key in client.scan_iter(EVERY_META, count=1000)
            ]

        return sorted(run_of_meta(key.decode()) for key in store.retrying("runs", scan))

    def refresh_limits(self) -> bool:
        """Take over what was set since the last look; whether there was anything. One short read."""
        return self.look()[0]

    def look(self) -> tuple[bool, memory.MemoryUse]:
        """`refresh_limits`, and how many payload bytes the run holds, in one round trip."""
        limits = ("HMGET", self.keys.meta, "limits_version", "limits_op")
        stamp, held = self.store.each(
            "limits", [limits, ("HMGET", self.keys.bytes, *memory.FIELDS)], "control"
        )
        changed = _stamp(*stamp) != self._limits_stamp
        if changed:
            self._adopt_limits()
        return changed, self.memory.use(memory.ByteCount.parse(held))

    def _adopt_limits(self) -> None:
        raw: Any = self.store.retrying("limits", lambda: self.store.control.hgetall(self.keys.meta))
        meta = {k.decode(): v.decode() for k, v in raw.items()}
        self.limits.adopt(RunLimits.from_meta(meta))
        self._limits_stamp = _stamp(meta.get("limits_version"), meta.get("limits_op"))

    def set(self, settings: LiveSettings, *, producer: str = "") -> dict[str, tuple[Any, Any]]:
        """Change limits while the run goes on; what changed, by name: (before, after). Raises
        ConfigError; Fenced where `producer`, who says so, is not the producer any more.
        """
        operation = new_nonce()
        while True:
            self.refresh_limits()
            wanted = settings.applied(self.limits, self.ledger.steps()[0])
            changes = differences(self.limits, wanted)
            reply = unfenced(self._set(operation, wanted.to_meta(changes), producer), "producer")
            if reply[0] == "NO_RUN":
                raise RunNotFound(f"there is no run {self.name!r} any more")
            if reply[0] != "CONFLICT":  # somebody else changed something meanwhile: look again
                self.refresh_limits()
                return changes

    def _set(self, operation: str, fields: list[str], producer: str) -> list[Any]:
        return self.store.call(
            "set_limits",
            self.keys.slots(),
            {"operation": operation, "version": self._limits_stamp[0], "producer": producer},
            tail_args=fields,
            durable=True,
        )

    def read_progress(self, tasks: Iterable[str] | None = None) -> ProduceProgress:
        """How far these tasks are, by default those of training; KeyError for one that the run has
        not.
        """
        names = self.limits.training_tasks if tasks is None else list(tasks)
        for name in names:
            self.limits.tasks[name]
        return read_progress(self.store, self.keys, names)

    def progress(self, task: str) -> dict[str, str]:
        """The account and counters of a task, as in redis-cli."""
        raw: Any = self.store.retrying(
            "progress", lambda: self.store.control.hgetall(self.keys.progress(task))
        )
        return {k.decode(): v.decode() for k, v in raw.items()}

    def record(self, gid: str) -> dict[str, str]:
        """The record of a group; empty where it has ended or never was."""
        raw: Any = self.store.retrying(
            "record", lambda: self.store.control.hgetall(self.keys.group(gid))
        )
        return {k.decode(): v.decode() for k, v in raw.items()}


def _stamp(version: bytes | str | None, operation: bytes | str | None) -> tuple[int, str]:
    """Which limits these are: how many changes there were, and the last one's nonce."""
    return int(version or 0), operation.decode() if isinstance(
        operation, bytes
    ) else operation or ""
