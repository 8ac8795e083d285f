"""Groups to a file for data curators, one line per rollout: those that live, in order of their
draws, or whole batches.

On a live run the groups are of different instants; each is whole. One whose bytes are gone or
damaged (a dead group may be dead for that) is left out and named: it never stands in the way of the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from buffer.batches.ledger import BatchLedger
from buffer.curation.line_file import new_file
from buffer.curation.rollout_line import lines_of
from buffer.errors import LedgerError, PayloadMissing, WireError
from buffer.groups.record_walk import Record, RecordWalk
from buffer.model.job import PayloadRef
from buffer.model.staleness import staleness
from buffer.query.language import Node, matches
from buffer.query.record import GroupRecord, Moment
from buffer.query.scan import moment_of
from buffer.replay_buffer import ReplayBuffer
from buffer.store.keys import Keys
from buffer.store.replies import Advance, no_advance
from buffer.store.store import Store

_ENDED_MEANWHILE = 3
"""How often a group is looked up again whose bytes were freed between two looks."""


@dataclass(slots=True)
class Exported:
    """What is in the file, and why a gid is not. `steps` are the batches of an export of archived
    ones.
    """

    groups: int = 0
    rollouts: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    steps: range = range(0)


class _Found(NamedTuple):
    """A group that is wanted: its lines, or why there are none."""

    gid: str
    lines: list[dict[str, Any]]
    fault: str = ""


class GroupExport:
    """Writes groups of one run."""

    def __init__(self, store: Store, keys: Keys, buffer: ReplayBuffer, ledger: BatchLedger) -> None:
        self._store = store
        self._keys = keys
        self._buffer = buffer
        self._ledger = ledger

    def write(
        self, path: Path, tasks: Sequence[str], query: Node, advance: Advance = no_advance
    ) -> Exported:
        """All living groups of `tasks` that fit the question to a new .jsonl or .parquet file."""
        return self._write(path, self._living(tasks, query), Exported(), advance)

    def write_archived(self, path: Path, advance: Advance = no_advance) -> Exported:
        """All archived batches that are retained and were not exported yet, in order. No file where
        there is none.
        """
        done = Exported(steps=self._unexported())
        return self._write(path, self._archived(done.steps), done, advance) if done.steps else done

    def _write(
        self, path: Path, groups: Iterator[_Found], done: Exported, advance: Advance
    ) -> Exported:
        with new_file(path) as file:
            for gid, lines, fault in groups:
                if fault:
                    done.unreadable[gid] = fault
                    continue
                for line in lines:
                    file.add(line)
                done.groups, done.rollouts = done.groups + 1, done.rollouts + len(lines)
                advance("groups", done.groups)
        return done

    def _living(self, tasks: Sequence[str], query: Node) -> Iterator[_Found]:
        moment = moment_of(self._store, self._ledger)
        for task in tasks:
            for gid, record in RecordWalk(self._store, self._keys).records(task):
                if found := self._find(gid, record, query, moment):
                    yield found

    def _find(self, gid: str, record: Record, query: Node, moment: Moment) -> _Found | None:
        """The group, where it is wanted; a record that moved while its bytes were fetched is read
        again.
        """
        for _ in range(_ENDED_MEANWHILE):
            seen = GroupRecord.of(gid, record, moment)
            if seen is None or not matches(query, seen):
                return None
            found = self._read(_ref(gid, record), seen.stage, seen.staleness)
            if not found.fault or (again := self._record(gid)) == record:
                return found
            record = again
        return None

    def _archived(self, steps: range) -> Iterator[_Found]:
        for step in steps:
            manifest = self._ledger.manifest(step)
            if manifest is None:
                raise LedgerError(
                    f"the batch of step {step} was freed while it was exported", hint="export again"
                )
            for entry in manifest.entries:
                age = None if entry.version is None else staleness(step, entry.version)
                yield self._read(entry.payload, "archived", age)

    def _unexported(self) -> range:
        ledger = self._keys.ledger(self._ledger.name)
        exported = self._store.retrying(
            "exported", lambda: self._store.control.hget(ledger, "exported")
        )
        archived = self._ledger.archive.steps()
        return range(max(archived.start, int(exported or 0) + 1), archived.stop)

    def _read(self, ref: PayloadRef, stage: str, age: int | None) -> _Found:
        try:
            return _Found(ref.gid, list(lines_of(self._buffer.read(ref), stage, age)))
        except (PayloadMissing, WireError) as error:
            return _Found(ref.gid, [], error.message)

    def _record(self, gid: str) -> Record:
        raw = self._store.retrying(
            "record", lambda: self._store.control.hgetall(self._keys.group(gid))
        )
        return {name.decode(): value.decode() for name, value in raw.items()}


def _ref(gid: str, record: Record) -> PayloadRef:
    crc = "" if record["payload"] == "init" else record.get("crc", "")
    return PayloadRef(
        gid, record["payload"], int(record["chunks"]), int(record.get("size") or 0), crc
    )
