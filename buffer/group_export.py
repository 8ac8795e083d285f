"""Groups to a file for data curators, one line per rollout, in order of their draws.

On a live run the groups are of different instants; each is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer.errors import PayloadMissing
from buffer.group import RolloutGroup
from buffer.keys import Keys
from buffer.ledger import BatchLedger
from buffer.line_file import new_file
from buffer.payloads import PayloadRef
from buffer.record_walk import Record, RecordWalk
from buffer.replay_buffer import ReplayBuffer
from buffer.rollout_line import lines_of
from buffer.snapshot_cut import Advance, no_advance
from buffer.staleness import staleness
from buffer.store import Store

_ENDED_MEANWHILE = 3
"""How often a group is looked up again whose bytes were freed between two looks."""


@dataclass(frozen=True, slots=True)
class Exported:
    groups: int
    rollouts: int


class GroupExport:
    """Writes groups of one run."""

    def __init__(self, store: Store, keys: Keys, buffer: ReplayBuffer, ledger: BatchLedger) -> None:
        self._store, self._keys, self._buffer, self._ledger = store, keys, buffer, ledger

    def write(
        self, path: Path, tasks: Sequence[str], status: str = "completed", advance: Advance = no_advance
    ) -> Exported:
        """All living groups of `tasks` with that status (in pools and batches) to a new .jsonl or .parquet file."""
        groups = rollouts = 0
        next_step = self._ledger.steps()[0] + 1
        with new_file(path) as file:
            for task in tasks:
                for gid, seen in RecordWalk(self._store, self._keys).records(task):
                    record, group = self._read(gid, seen, status)
                    if group is None:
                        continue
                    for line in lines_of(group, record["stage"], _staleness(record, next_step)):
                        file.add(line)
                    groups, rollouts = groups + 1, rollouts + len(group)
                    advance("groups", groups)
        return Exported(groups, rollouts)

    def _read(self, gid: str, record: Record, status: str) -> tuple[Record, RolloutGroup | None]:
        """The group, where it is wanted; a record that moved while its bytes were fetched is read again."""
        for _ in range(_ENDED_MEANWHILE):
            if not record or record["status"] != status:
                return record, None
            crc = "" if record["payload"] == "init" else record.get("crc", "")
            ref = PayloadRef(gid, record["payload"], int(record["chunks"]), int(record.get("size") or 0), crc)
            try:
                return record, self._buffer.get(ref)
            except PayloadMissing:
                again = self._record(gid)
                if again == record:
                    raise
                record = again
        return record, None

    def _record(self, gid: str) -> Record:
        raw = self._store.retrying("record", lambda: self._store.control.hgetall(self._keys.group(gid)))
        return {name.decode(): value.decode() for name, value in raw.items()}


def _staleness(record: Record, next_step: int) -> int | None:
    """Up to the step that took the group, or to the next step."""
    ledger, _, step = record.get("batch", "").rpartition(":")
    if not record.get("version"):
        return None
    return staleness(int(step) if ledger == "train" else next_step, int(record["version"]))
