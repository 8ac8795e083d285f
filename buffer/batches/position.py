"""Which draws a line of weights was trained on, small enough for every checkpoint (I6).

Draws are numbered per task and trained almost in order: a low-water mark says most of it, and a
bitmap the rest, one bit for each draw above the mark (compressed in the checkpoint). It is ordered
like a bitmap of the server.

Where the training of a run stands, as a checkpoint remembers it: all that a server may forget (I6).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from buffer.errors import AccountError
from buffer.model.ids import IMPORTED_FROM, split_group_id
from buffer.model.manifest import Manifest

Bools = NDArray[np.bool_]


def _pack(bits: bytearray) -> str:
    return base64.b64encode(zlib.compress(bits)).decode() if bits else ""


def _unpack(value: Any) -> Any:
    try:
        return (
            bytearray(zlib.decompress(base64.b64decode(value)))
            if isinstance(value, str) and value
            else value
        )
    except zlib.error as error:
        raise ValueError(f"no bitmap: {error}") from error


Bits = Annotated[
    bytearray, BeforeValidator(lambda value: _unpack(value) or bytearray()), PlainSerializer(_pack)
]


class DrawSet(BaseModel):
    """All draws below `low`, and draw low + n for every bit n that is set; the highest bit of a
    byte is first.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    low: int = 0
    bits: Bits = bytearray()

    def __contains__(self, draw: int) -> bool:
        byte, bit = divmod(draw - self.low, 8)
        return draw < self.low or (byte < len(self.bits) and bool(self.bits[byte] & 0x80 >> bit))

    def add(self, draw: int) -> None:
        if draw < self.low:
            return
        byte, bit = divmod(draw - self.low, 8)
        self.bits.extend(bytes(max(0, byte + 1 - len(self.bits))))
        self.bits[byte] |= 0x80 >> bit
        if self.bits[0] == 0xFF:
            left = self.bits.lstrip(b"\xff")
            self.low += 8 * (len(self.bits) - len(left))
            self.bits = left

    def __len__(self) -> int:
        return self.low + int.from_bytes(self.bits, "big").bit_count()

    def to_bools(self) -> Bools:
        """bool[n]: whether draw i is in; those from n on are not."""
        above = np.unpackbits(np.frombuffer(bytes(self.bits), "u1")).astype(bool)
        return np.concatenate([np.ones(self.low, bool), above])


class TrainedDraws(BaseModel):
    """`DrawSet` by task; imported groups have one of their own, since they are numbered far away
    from the others.
    """

    model_config = ConfigDict(extra="forbid")

    tasks: dict[str, DrawSet] = {}
    imported: dict[str, DrawSet] = {}

    def add_batch(self, step: int, gids: Iterable[str]) -> None:
        """Count a batch as trained. AccountError, and nothing changed, if one of its groups was
        trained before.
        """
        batch = list(gids)
        seen = [gid for gid in batch if gid in self]
        if seen or len(set(batch)) != len(batch):
            raise AccountError(
                f"the batch of step {step} holds groups that these weights were already trained on: {seen[:5]}",
                hint="do not train it; look at `rolloutmq fsck`",
            )
        for gid in batch:
            draws, task, draw = self._find(gid)
            draws.setdefault(task, DrawSet()).add(draw)

    def __contains__(self, gid: str) -> bool:
        draws, task, draw = self._find(gid)
        return task in draws and draw in draws[task]

    def count(self, task: str) -> int:
        """Groups of a task that were trained."""
        return sum(len(draws[task]) for draws in (self.tasks, self.imported) if task in draws)

    def _find(self, gid: str) -> tuple[dict[str, DrawSet], str, int]:
        task, draw = split_group_id(gid)
        return (
            (self.tasks, task, draw)
            if draw < IMPORTED_FROM
            else (self.imported, task, draw - IMPORTED_FROM)
        )


class Position(BaseModel):
    """Keep it in every checkpoint (it is JSON), and hand it to `RolloutConsumer.open`: a server
    that lost its last second, or everything, is told again what was trained.
    """

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """the last train step that is in the weights"""
    lineage: str = ""
    """of the weights"""
    run: str = ""
    run_nonce: str = ""
    cursors: dict[str, int] = {}
    """next draw of each task when this was written"""
    batches: dict[int, list[str]] = {}
    """manifests, as lines, of the steps since the oldest checkpoint that is kept"""
    trained: TrainedDraws = TrainedDraws()

    def add(self, manifest: Manifest) -> None:
        """A batch was trained. AccountError, and nothing changed, if one of its groups was trained
        before.
        """
        self.trained.add_batch(manifest.step, manifest.gids)
        self.batches[manifest.step] = manifest.lines
        self.step = manifest.step

    def forget(self, keep: int) -> None:
        """`keep` is the oldest checkpoint that is kept: batches up to it are never delivered again."""
        self.batches = {step: lines for step, lines in self.batches.items() if step > keep}

    @property
    def kept(self) -> set[str]:
        """The groups of the steps since the oldest checkpoint kept."""
        return {line.partition(" ")[0] for _, *lines in self.batches.values() for line in lines}

    def manifest(self, step: int) -> Manifest | None:
        """What was trained in a step since the oldest checkpoint kept."""
        lines = self.batches.get(step)
        return Manifest.parse(step, lines) if lines else None
