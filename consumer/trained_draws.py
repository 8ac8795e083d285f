"""Which draws a line of weights was trained on, small enough for every checkpoint (I6).

Draws are numbered per task and trained almost in order, so a low-water mark and a few exceptions say it all.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from buffer.errors import AccountError
from buffer.keys import split_group_id


class DrawSet(BaseModel):
    """All draws below `low`, and those in `above`."""

    model_config = ConfigDict(extra="forbid")

    low: int = 0
    above: set[int] = set()

    def __contains__(self, draw: int) -> bool:
        return draw < self.low or draw in self.above

    def add(self, draw: int) -> None:
        self.above.add(draw)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def __len__(self) -> int:
        return self.low + len(self.above)


class TrainedDraws(BaseModel):
    """`DrawSet` by task."""

    model_config = ConfigDict(extra="forbid")

    tasks: dict[str, DrawSet] = {}

    def add_batch(self, step: int, gids: Iterable[str]) -> None:
        """Count a batch as trained. AccountError, and nothing changed, if one of its groups was trained before."""
        draws = [split_group_id(gid) for gid in gids]
        seen = [f"{task}-{draw:010d}" for task, draw in draws if draw in self.tasks.get(task, DrawSet())]
        if seen or len(set(draws)) != len(draws):
            raise AccountError(
                f"the batch of step {step} holds groups that these weights were already trained on: {seen[:5]}",
                hint="do not train it; look at `rolloutmq fsck`",
            )
        for task, draw in draws:
            self.tasks.setdefault(task, DrawSet()).add(draw)
