"""What a checkpoint records about the training of a run: all that a server may lose (I6).

Draws are numbered per task and trained almost in order: a low-water mark describes most of them, a
bitmap the rest, in the bit order of a server's bitmap (compressed in the checkpoint).
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from buffer.errors import AccountError
from buffer.ids import IMPORTED_FROM, split_group_id
from buffer.manifest import Manifest

Bools = NDArray[np.bool_]


def _pack(bits: bytearray) -> str:
    return base64.b64encode(zlib.compress(bits)).decode() if bits else ""


def _unpack(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return bytearray(zlib.decompress(base64.b64decode(value))) if value else bytearray()
    except zlib.error as error:
        raise ValueError(f"not a compressed bitmap: {error}") from error


Bits = Annotated[bytearray, BeforeValidator(_unpack), PlainSerializer(_pack)]


class DrawSet(BaseModel):
    """All draws below `low`, and low + n for each set bit n, the highest bit of a byte first."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    low: int = 0
    bits: Bits = bytearray()

    def __contains__(self, draw: int) -> bool:
        byte, bit = divmod(draw - self.low, 8)
        return draw < self.low or (byte < len(self.bits) and bool(self.bits[byte] & 0x80 >> bit))

    def add(self, draw: int) -> None:
        """Add a draw, and move the mark over the draws that are then complete."""
        if draw < self.low:
            return
        byte, bit = divmod(draw - self.low, 8)
        self.bits.extend(bytes(max(0, byte + 1 - len(self.bits))))
        self.bits[byte] |= 0x80 >> bit
        # complete leading bytes move into the mark, so that the bitmap stays short
        if self.bits[0] == 0xFF:
            left = self.bits.lstrip(b"\xff")
            self.low += 8 * (len(self.bits) - len(left))
            self.bits = left

    def __len__(self) -> int:
        return self.low + int.from_bytes(self.bits, "big").bit_count()

    def to_bools(self) -> Bools:
        """Return bool[n], whether the set contains draw i; it contains none from n on."""
        above = np.unpackbits(np.frombuffer(bytes(self.bits), "u1")).astype(bool)
        return np.concatenate([np.ones(self.low, bool), above])


class TrainedDraws(BaseModel):
    """A `DrawSet` for each task, and one for its imported groups, whose numbers start far above."""

    model_config = ConfigDict(extra="forbid")

    tasks: dict[str, DrawSet] = {}
    imported: dict[str, DrawSet] = {}

    def add_batch(self, step: int, gids: Iterable[str]) -> None:
        """Add a batch. Raises AccountError, and adds nothing, if a group was trained before."""
        batch = list(gids)
        seen = [gid for gid in batch if gid in self]
        if seen or len(set(batch)) != len(batch):
            raise AccountError(
                f"the batch of step {step} holds groups that these weights were already trained "
                f"on: {seen[:5]}",
                hint="do not train it; run `rolloutmq fsck`",
            )
        for gid in batch:
            draws, task, draw = self._find(gid)
            draws.setdefault(task, DrawSet()).add(draw)

    def __contains__(self, gid: str) -> bool:
        draws, task, draw = self._find(gid)
        return task in draws and draw in draws[task]

    def count(self, task: str) -> int:
        return sum(len(draws[task]) for draws in (self.tasks, self.imported) if task in draws)

    def _find(self, gid: str) -> tuple[dict[str, DrawSet], str, int]:
        task, draw = split_group_id(gid)
        if draw < IMPORTED_FROM:
            return self.tasks, task, draw
        return self.imported, task, draw - IMPORTED_FROM


def link(head: str, terms: str, lines: Sequence[str]) -> str:
    """Return the head of a chain of steps behind one more, whose manifest has these lines."""
    return hashlib.sha256("\n".join([head, terms, *lines]).encode()).hexdigest()


class Position(BaseModel):
    """The training of a run, for a checkpoint, as JSON.

    Passed to `RolloutConsumer.open`, it restores what a server lost: its last second, or all data.
    """

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # last train step in the weights
    lineage: str = ""
    run: str = ""
    run_nonce: str = ""
    cursors: dict[str, int] = {}  # next draws when the checkpoint was written
    batches: dict[int, list[str]] = {}  # as lines, of the steps after the oldest kept checkpoint
    trained: TrainedDraws = TrainedDraws()
    skipped: dict[str, DrawSet] = {}  # when the checkpoint was written, by task
    terms: dict[int, str] = {}  # digests of config and code, by the first step of each
    proof: str = ""  # head of the chain of all trained steps (`link`)

    def add(self, manifest: Manifest) -> None:
        """Record that a batch was trained. Raises AccountError as `add_batch`."""
        self.trained.add_batch(manifest.step, manifest.gids)
        self.batches[manifest.step] = manifest.lines
        self.step = manifest.step
        self.proof = link(self.proof, self.terms_of(self.step), manifest.lines)

    def terms_of(self, step: int) -> str:
        """Return the digest of the terms of a step; "" where the trainer gave none."""
        first = max((first for first in self.terms if first <= step), default=None)
        return "" if first is None else self.terms[first]

    def set_terms(self, digest: str) -> None:
        """Let later steps have other terms, as after an edit of the config."""
        if self.terms_of(self.step) != digest:
            self.terms[self.step + 1] = digest

    def forget(self, keep: int) -> None:
        """Remove the manifests up to `keep`, the oldest kept checkpoint, which no take needs."""
        self.batches = {step: lines for step, lines in self.batches.items() if step > keep}

    @property
    def kept(self) -> set[str]:
        """Return the groups of the steps after the oldest kept checkpoint."""
        return {line.partition(" ")[0] for _, *lines in self.batches.values() for line in lines}

    def manifest(self, step: int) -> Manifest | None:
        """Return the manifest of a step after the oldest kept checkpoint, or None."""
        lines = self.batches.get(step)
        return Manifest.parse(step, lines) if lines else None
