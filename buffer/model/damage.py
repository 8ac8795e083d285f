from __future__ import annotations

from typing import Literal, NamedTuple


class Damage(NamedTuple):
    """One fault that `fsck` found, with the whole Redis key and the group if known.

    `kind`: "lost" is a group in no stage, "doubled" one in two stages or batches.
    """

    text: str
    key: str = ""
    gid: str = ""
    kind: Literal["fault", "lost", "doubled"] = "fault"

    def __str__(self) -> str:
        return self.text
