"""A folder that all ranks write together: it becomes visible once each has written its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from consumer.ranks import Ranks

T = TypeVar("T")
Save = Callable[[Path], None]


def write_together(ranks: Ranks, save: Save, make: Callable[[Save], T]) -> T | None:
    """Let all ranks write into a folder that rank 0 creates; all ranks must call it.

    `make(save_all)` runs on rank 0 only, and calls `save_all(folder)` once (for example
    `CheckpointFolder.write`). `save(folder)` runs on every rank; all of them must be able to access
    the folder. Returns the result of `make` on rank 0, None on the others. A rank that dies during
    the call breaks the connection of the others: nothing becomes visible.

        write_together(ranks, save, lambda save_all: checkpoints.write(position, save_all))
    """

    def write_part(folder: str) -> None:
        save(Path(ranks.say(folder)[0]))
        ranks.say("written")

    if ranks.rank == 0:
        return make(lambda folder: write_part(str(folder)))
    write_part("")
    return None
