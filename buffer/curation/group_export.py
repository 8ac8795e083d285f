"""Export groups to a file for data curators, one line per rollout: living groups, or batches.

On a live run, groups are read at different times. A group whose bytes are missing or damaged is
left out and reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from buffer.curation.line_file import new_file
from buffer.curation.rollout_line import lines_of
from buffer.errors import LedgerError, PayloadMissing, WireError
from buffer.groups.record_walk import Record, RecordWalk, payload_of
from buffer.groups.replay_buffer import ReplayBuffer
from buffer.job import PayloadRef
from buffer.ledger.ledger import BatchLedger
from buffer.query.language import Node, matches
from buffer.query.record import GroupRecord, Moment
from buffer.query.scan import moment_of
from buffer.redis.keys import Keys
from buffer.redis.scripts import Advance, no_advance
from buffer.redis.store import Store
from buffer.wire.staleness import staleness


@dataclass(slots=True)
class Exported:
    """What is in the file: `unreadable` has the reason by gid, `steps` the exported batches."""

    groups: int = 0
    rollouts: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    steps: range = range(0)


class _Found(NamedTuple):
    """The lines of a group to be exported, or why there are none."""

    gid: str
    lines: list[dict[str, Any]]
    fault: str = ""


class GroupExport:
    def __init__(self, store: Store, keys: Keys, buffer: ReplayBuffer, ledger: BatchLedger) -> None:
        self._store = store
        self._keys = keys
        self._buffer = buffer
        self._ledger = ledger

    def write(
        self, path: Path, tasks: Sequence[str], query: Node, advance: Advance = no_advance
    ) -> Exported:
        """Write the living groups of `tasks` that match to a new .jsonl or .parquet file."""
        return self._write(path, self._living(tasks, query), Exported(), advance)

    def write_archived(self, path: Path, advance: Advance = no_advance) -> Exported:
        """Write the retained batches that were not exported yet, if any, in order.

        In a folder, the file is named for its first step. One of that name was written by a process
        that died before the batches were marked as exported: it is replaced.
        """
        archived = self._ledger.archive.steps()
        first = max(archived.start, self._ledger.archive.exported() + 1)
        done = Exported(steps=range(first, archived.stop))
        if not done.steps:
            return done
        if path.is_dir():
            path /= f"step_{done.steps[0]:07}.jsonl"
            path.unlink(missing_ok=True)
        return self._write(path, self._archived(done.steps), done, advance)

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
                done.groups += 1
                done.rollouts += len(lines)
                advance("groups", done.groups)
        return done

    def _living(self, tasks: Sequence[str], query: Node) -> Iterator[_Found]:
        moment = moment_of(self._store, self._ledger)
        for task in tasks:
            for gid, record in RecordWalk(self._store, self._keys).records(task):
                if found := self._find(gid, record, query, moment):
                    yield found

    def _find(self, gid: str, record: Record, query: Node, moment: Moment) -> _Found | None:
        """Return a group if it matches; None if it does not, or ends meanwhile."""
        for _ in range(3):  # its bytes may be freed after the record was read
            facts = GroupRecord.of(gid, record, moment)
            if facts is None or not matches(query, facts):
                return None
            found = self._read(payload_of(gid, record), facts.stage, facts.staleness)
            if not found.fault:
                return found
            raw = self._store.ask("record", "HGETALL", self._keys.group(gid))
            newer_record = {name.decode(): value.decode() for name, value in raw.items()}
            if newer_record == record:
                return found
            record = newer_record  # the group moved while its bytes were read
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

    def _read(self, ref: PayloadRef, stage: str, age: int | None) -> _Found:
        try:
            return _Found(ref.gid, list(lines_of(self._buffer.read(ref), stage, age)))
        except (PayloadMissing, WireError) as error:
            return _Found(ref.gid, [], error.message)
