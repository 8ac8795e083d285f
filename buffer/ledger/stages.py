"""Read groups and the stages in which the server has them, as the script `check` finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from buffer.groups.record_walk import Record
from buffer.ids import IMPORTED_FROM, POOLS, split_group_id
from buffer.redis.bounds import GROUPS_PER_CALL, KEYS_PER_TRIP
from buffer.redis.key_fields import MISSING, RECORD_FIELDS, Damage, is_whole
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import RunContext


class GroupRow(NamedTuple):
    """A group at one instant; `scores` are those that it has in pools, by status."""

    key: str
    gid: str
    stages: list[str]
    scores: dict[str, float]
    record: Record
    is_whole: bool
    """whether no field of the record is missing or malformed"""


class StageReader:
    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, _, _ = context

    def rows(self, gids: Sequence[str]) -> Iterator[GroupRow]:
        """Yield each group with its record and stages, read at one instant for each."""
        calls: list[ScriptCall] = []
        for task, pairs in groupby(map(split_group_id, gids), lambda pair: pair[0]):
            keys, draws = self._keys.slots(task=task), [draw for _, draw in pairs]
            args = {"task": task, "fields": " ".join(RECORD_FIELDS)}
            slices = (
                draws[start : start + GROUPS_PER_CALL]
                for start in range(0, len(draws), GROUPS_PER_CALL)
            )
            calls += [ScriptCall("check", keys, args, (), some) for some in slices]
        names = iter(gids)
        for start in range(0, len(calls), KEYS_PER_TRIP // GROUPS_PER_CALL):
            together = calls[start : start + KEYS_PER_TRIP // GROUPS_PER_CALL]
            for _ok, *rows in self._store.send("check", together):
                for row in rows:
                    gid = next(names)
                    yield _row(self._keys.group(gid), gid, row)


def _row(key: str, gid: str, text: str) -> GroupRow:
    found, _, values = text.partition("\0")
    fields = zip(RECORD_FIELDS, values.split("\0"), strict=False)
    record = {name: value for name, value in fields if value != MISSING}
    stages, scores = [], {}
    for stage in found.split():
        status, _, score = stage.partition(":")
        stages.append("pool" if status in POOLS else stage)
        if score:
            scores[status] = float(score)
    return GroupRow(key, gid, stages, scores, record, is_whole(values, record.get("stage", "")))


def stage_faults(row: GroupRow, cursor: int) -> Iterator[Damage]:
    """Yield the fault of a group that is in no stage, or in two; `cursor`: of its task."""
    draw = int(row.gid[-10:])
    # a draw from the cursor on need not have entered yet
    if not row.stages and not cursor <= draw < IMPORTED_FROM:
        yield Damage(f"{row.gid} is in no stage", row.key, row.gid, "lost")
    elif len(row.stages) > 1:
        yield doubled(row.gid, ", ".join(row.stages))


def doubled(gid: str, where: str) -> Damage:
    return Damage(f"{gid} ({where})", gid=gid, kind="doubled")
