"""A run on a server: the one handle through which workers, producers, trainers and the command see it.

    store = Store(url)
    run = Run.open(store, "demo")
    run.jobs · run.dead_letters · run.buffer · run.ledger · run.control · run.fleet · run.account · run.payloads
    run.groups
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buffer.account import Account
from buffer.control import RunControl
from buffer.dead_letters import DeadLetters
from buffer.errors import RunExists, RunNotFound, SchemaVersionError
from buffer.fleet import Fleet
from buffer.group_export import Exported, GroupExport
from buffer.group_import import GroupImport, Imported
from buffer.group_scan import GroupScan
from buffer.jobs import JobQueue
from buffer.keys import EVERY_META, Keys, run_of_meta
from buffer.ledger import BatchLedger
from buffer.limits import LOADING, SCHEMA, RunLimits
from buffer.payloads import PayloadStore
from buffer.replay_buffer import ReplayBuffer
from buffer.rollout import PolicyVersion
from buffer.snapshot_cut import Advance, no_advance
from buffer.snapshot_folder import SnapshotFacts
from buffer.snapshot_loader import SnapshotLoader
from buffer.snapshot_saver import SnapshotSaver
from buffer.store import Store


class Run:
    """All parts of one run; make it with `create` or `open`."""

    def __init__(self, store: Store, name: str, nonce: str, limits: RunLimits) -> None:
        self.store, self.name, self.nonce, self.limits = store, name, nonce, limits
        self.keys = Keys(name)
        self.payloads = PayloadStore(store, self.keys)
        self.jobs = JobQueue(store, self.keys, limits)
        self.dead_letters = DeadLetters(store, self.keys)
        self.buffer = ReplayBuffer(store, self.keys, limits, self.payloads)
        self.ledger = BatchLedger(store, self.keys, limits)
        self.evaluations = BatchLedger(store, self.keys, limits, "eval")
        self.control = RunControl(store, self.keys, limits)
        self.fleet = Fleet(store, self.keys, limits)
        self.account = Account(store, self.keys, limits)
        self.groups = GroupScan(store, self.keys, limits, (self.ledger, self.evaluations))

    @classmethod
    def create(
        cls, store: Store, name: str, nonce: str, limits: RunLimits, weights: PolicyVersion, path: str
    ) -> Run:
        """Make the run, or open it where this very one (by nonce) exists. RunExists for another one of the name."""
        keys = Keys(name)
        reply = store.call(
            "create_run",
            {
                "meta": keys.meta,
                "control": keys.control,
                "ledger": keys.ledger("train"),
                "events": keys.events,
            },
            {"nonce": nonce, "schema": SCHEMA, "weights": str(weights), "path": path},
            tail_args=limits.to_meta(),
            durable=True,
        )
        if reply[0] == "EXISTS":
            raise RunExists(
                f"another run named {name!r} is on this server (nonce {reply[1][:8]}…, made at {reply[2]} ms)",
                hint="choose another [run] name, or use the folder that belongs to it",
            )
        return cls(store, name, nonce, limits)

    @classmethod
    def open(cls, store: Store, name: str) -> Run:
        """The run of that name, with the limits it was made with. RunNotFound where there is none."""
        keys = Keys(name)
        raw: Any = store.retrying("open run", lambda: store.control.hgetall(keys.meta))
        meta = {k.decode(): v.decode() for k, v in raw.items()}
        if not meta:
            raise RunNotFound(
                f"there is no run {name!r} on this server", hint="`rolloutmq status` without a name lists the runs"
            )
        if meta.get("schema") == LOADING:
            raise RunNotFound(
                f"run {name!r} is being resumed from a snapshot, or that was interrupted",
                hint="wait for its end; `rolloutmq resume` clears away what an interrupted one left",
            )
        if meta.get("schema") != SCHEMA:
            raise SchemaVersionError(f"run {name!r} has schema {meta.get('schema')}; this version knows {SCHEMA}")
        return cls(store, name, meta["nonce"], RunLimits.from_meta(meta))

    def save(self, folder: Path, *, attempts: int = 5, advance: Advance = no_advance) -> SnapshotFacts:
        """Write all of the run into a new folder, as of one instant; see `buffer.snapshot_saver`.

        The run may go on meanwhile, but its index must stand still for one of `attempts` copies of it: SnapshotError
        otherwise, and no folder.
        """
        return SnapshotSaver(self.store, self.keys, self.limits, self.payloads).save(folder, attempts, advance)

    @classmethod
    def resume(cls, store: Store, folder: Path, *, name: str | None = None, advance: Advance = no_advance) -> Run:
        """The run that `save` wrote, on a server that has none of that `name` (default: the one it had).

        Raises SnapshotError, SchemaVersionError or RunExists; the server is then as it was before.
        """
        loader = SnapshotLoader(store, folder, name)
        loader.load(advance)
        return cls.open(store, loader.keys.run)

    def export(
        self, path: Path, *, task: str | None = None, status: str = "completed", advance: Advance = no_advance
    ) -> Exported:
        """Write the living groups of that status to a new .jsonl or .parquet file, one line per rollout."""
        tasks = [task] if task else list(self.limits.tasks)
        return GroupExport(self.store, self.keys, self.buffer, self.ledger).write(path, tasks, status, advance)

    def import_groups(
        self, path: Path, *, task: str | None = None, from_line: int = 1, advance: Advance = no_advance
    ) -> Imported:
        """Put the groups of a .jsonl or .parquet file into the pools. DatasetError, and nothing imported, if a line
        is wrong; see `buffer.group_import`."""
        reader = GroupImport(self.store, self.keys, self.limits, self.payloads, self.buffer.order_function)
        return reader.read(path, task, from_line=from_line, advance=advance)

    @staticmethod
    def names(store: Store) -> list[str]:
        """The runs on a server. Walks the key space in slices: for people, never for a hot path."""
        found = store.retrying("runs", lambda: list(store.control.scan_iter(EVERY_META, count=1000)))
        return sorted(run_of_meta(key.decode()) for key in found)

    def progress(self, task: str) -> dict[str, str]:
        """The account and counters of a task, as in redis-cli."""
        raw: Any = self.store.retrying("progress", lambda: self.store.control.hgetall(self.keys.progress(task)))
        return {k.decode(): v.decode() for k, v in raw.items()}

    def record(self, gid: str) -> dict[str, str]:
        """The record of a group; empty where it has ended or never was."""
        raw: Any = self.store.retrying("record", lambda: self.store.control.hgetall(self.keys.group(gid)))
        return {k.decode(): v.decode() for k, v in raw.items()}

    def tidy(self) -> int:
        """What a janitor does, and any process may: reap leases, expire stale groups, forget old batches, free garbage.

        Returns how many groups and payloads were touched. Needs no leader and no lock.
        """
        touched = self.jobs.reap()
        for task in self.limits.training_tasks:
            touched += self.buffer.refresh(task)
        for ledger in (self.ledger, self.evaluations):
            ledger.forget()
        while freed := self.payloads.collect():
            touched += freed
        return touched
