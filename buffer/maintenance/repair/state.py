"""The run as a repair rebuilds it: groups, ends and batches, which all else follows from."""

from __future__ import annotations

from dataclasses import dataclass, field

from buffer.ledger.position import Position
from buffer.maintenance.repair.image import Hash, Image
from buffer.maintenance.repair.records import is_group, usable
from buffer.model.ids import ENDS, IMPORTED_FROM, group_id
from buffer.model.limits import RunLimits


@dataclass(slots=True)
class Rebuilt:
    """Contains what a repair decides.

    `position`: of the newest checkpoint, if one is known. `records`: of all groups that live, by
    gid. `ends`: draws by task and end. `batches`: the lines of the steps that can be delivered, by
    ledger; `archived`: of those that are retained. `ledgers`: their fields. `unusable`: gids whose
    records are of no use. `lost`, `closed`: gids that are drawn again, and that are not.
    """

    image: Image
    limits: RunLimits
    position: Position | None
    now_ms: int
    records: dict[str, Hash] = field(default_factory=dict)
    ends: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    batches: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    archived: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    ledgers: dict[str, Hash] = field(default_factory=dict)
    unusable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls, image: Image, limits: RunLimits, position: Position | None, now_ms: int
    ) -> Rebuilt:
        """Return the usable records and all ends of an image."""
        state = cls(image, limits, position, now_ms)
        for gid in sorted(image.below("group:")):
            found = image.hash(f"group:{gid}")
            record = usable(gid, found, limits, image.payloads) if is_group(gid, limits) else None
            if record:
                state.records[gid] = record
            elif is_group(gid, limits):
                state.unusable.append(gid)
        for task in limits.tasks:
            state.ends[task] = {end: image.bits(f"ended:{task}:{end}") for end in ENDS}
        return state

    def is_ended(self, task: str, draw: int) -> bool:
        """Return whether a draw has ended."""
        return any(draw in draws for draws in self.ends[task].values())

    def is_trained(self, gid: str) -> bool:
        """Return whether the checkpoint's weights were trained on a group."""
        return self.position is not None and gid in self.position.trained

    def living(self, task: str) -> set[int]:
        """Return the draws of a task that have a record."""
        return {int(record["draw"]) for record in self.records.values() if record["task"] == task}

    def trained(self, task: str) -> set[int]:
        """Return the draws of a task that the checkpoint's weights were trained on."""
        if self.position is None:
            return set()
        found: set[int] = set()
        for first, sets in (
            (0, self.position.trained.tasks),
            (IMPORTED_FROM, self.position.trained.imported),
        ):
            if task in sets:
                found |= {first + int(draw) for draw in sets[task].to_bools().nonzero()[0]}
        return found

    def lose(self, task: str, draw: int) -> None:
        """Let a group be drawn again; one from outside has no draw, and is closed."""
        self.records.pop(group_id(task, draw), None)
        if draw >= IMPORTED_FROM:
            self.close(task, draw, "dropped")
        else:
            self.lost.append(group_id(task, draw))

    def close(self, task: str, draw: int, end: str) -> None:
        """End a group."""
        self.records.pop(group_id(task, draw), None)
        self.ends[task][end].add(draw)
        self.closed.append(group_id(task, draw))
