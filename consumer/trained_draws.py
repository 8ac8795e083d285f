"""Which draws a line of weights was trained on, small enough for every checkpoint (I6).

Draws are numbered per task and trained almost in order, so a high-water mark and the few draws below it that were
not trained (in work, dropped, dead) say it all.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from buffer.errors import AccountError
from buffer.keys import IMPORTED_FROM, split_group_id


class DrawSet(BaseModel):
    """All draws below `high`, but for those in `missing`."""

    model_config = ConfigDict(extra="forbid")

    high: int = 0
    missing: set[int] = set()

    def __contains__(self, draw: int) -> bool:
        return draw < self.high and draw not in self.missing

    def add(self, draw: int) -> None:
        self.missing.update(range(self.high, draw))
        self.missing.discard(draw)
        self.high = max(self.high, draw + 1)

    def __len__(self) -> int:
        return self.high - len(self.missing)


class TrainedDraws(BaseModel):
    """`DrawSet` by task; imported groups have one of their own, since they are numbered far away from the others."""

    model_config = ConfigDict(extra="forbid")

    tasks: dict[str, DrawSet] = {}

    def add_batch(self, step: int, gids: Iterable[str]) -> None:
        """Count a batch as trained. AccountError, and nothing changed, if one of its groups was trained before."""
        batch = list(gids)
        numbered = {gid: _numbered(gid) for gid in batch}
        seen = [gid for gid, (task, draw) in numbered.items() if draw in self.tasks.get(task, DrawSet())]
        if seen or len(numbered) != len(batch):
            raise AccountError(
                f"the batch of step {step} holds groups that these weights were already trained on: {seen[:5]}",
                hint="do not train it; look at `rolloutmq fsck`",
            )
        for task, draw in numbered.values():
            self.tasks.setdefault(task, DrawSet()).add(draw)


def _numbered(gid: str) -> tuple[str, int]:
    task, draw = split_group_id(gid)
    return (task, draw) if draw < IMPORTED_FROM else (f"{task} (imported)", draw - IMPORTED_FROM)
