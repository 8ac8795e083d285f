"""A folder that all ranks write together: rank 0 makes it, and it becomes visible once each has written its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from consumer.ranks import Ranks

T = TypeVar("T")
Save = Callable[[Path], None]


def write_together(ranks: Ranks, save: Save, make: Callable[[Save], T]) -> T | None:
    """`make(save_all)` runs on rank 0 only, and calls `save_all(folder)` once (`CheckpointFolder.write`, say); `save`
    runs on every rank with that folder, which all of them must see. What `make` returns, on rank 0; else None.

    A rank that dies in here breaks the others' connection: nothing becomes visible.
    """

    def write_part(folder: str) -> None:
        save(Path(ranks.say(folder)[0]))
        ranks.say("written")

    if ranks.rank == 0:
        return make(lambda folder: write_part(str(folder)))
    write_part("")
    return None
