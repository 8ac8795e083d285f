"""Define a data set, and the row that each draw takes from it, a pure function of the draw (I3).

The position in the epoch goes through a keyed permutation: a Feistel network (Luby and Rackoff
1988) with cycle walking (Black and Rogaway 2002). Changing `place_of`, `permute` or `_feistel`
changes the order of existing runs; a test pins it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from buffer.errors import WireError
from buffer.wire.checks import check_plain
from buffer.wire.sampling import StructuredOutput

if TYPE_CHECKING:
    from producer_workers.images import ImageFile


class RowPlace(NamedTuple):
    """The epoch of a draw (0 is the first), and the row of the data set."""

    epoch: int
    row: int


def place_of(draw: int, rows: int, seed: int, *, shuffle: bool = True) -> RowPlace:
    """Return the place of draw `draw` (0, 1, 2 ...) in a data set of `rows` rows.

    Every epoch visits every row once, in its own order. Raises ValueError for draw < 0 or rows < 1.
    """
    if draw < 0 or rows < 1:
        raise ValueError(f"draw {draw} of {rows} rows: draws start at 0, and a data set has rows")
    epoch, position = divmod(draw, rows)
    return RowPlace(epoch, permute(position, rows, f"{seed}:{epoch}") if shuffle else position)


def permute(position: int, size: int, key: str) -> int:
    """Return where the permutation of 0 .. size - 1 with this key sends `position`."""
    digest = blake2b(key.encode(), digest_size=32).digest()
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    position = _feistel(position, half_bits, digest)
    while position >= size:  # the network permutes up to 4 x size positions: repeat until inside
        position = _feistel(position, half_bits, digest)
    return position


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left = value >> half_bits
    right = value & mask
    # 4 are enough in theory for large halves; small data sets have halves of a few bits
    for number in range(8):
        block = bytes([number]) + right.to_bytes(8, "little")
        mixed = int.from_bytes(blake2b(block, key=key, digest_size=8).digest(), "little")
        left, right = right, left ^ (mixed & mask)
    return left << half_bits | right


def _has_role(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise ValueError('expected an object with "role" and "content"')
    # null is no value: chat templates would write it out
    content = message["content"] if message["content"] is not None else ""
    return {**{key: each for key, each in message.items() if each is not None}, "content": content}


def _of_text(structured: Any) -> Any:
    """Return a structure, which a table holds as text, as an object."""
    return orjson.loads(structured) if isinstance(structured, str) else structured


def _is_valid(structured: StructuredOutput) -> StructuredOutput:
    try:
        check_plain("json_schema", [structured.json_schema])
        re.compile(structured.regex or "")
    except (WireError, re.error) as error:
        raise ValueError(str(error)) from error
    return structured


Structure = Annotated[StructuredOutput, BeforeValidator(_of_text), AfterValidator(_is_valid)]


class Problem(BaseModel):
    """One row: a chat, the tools it may use, and what a judge needs to score an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: list[Annotated[dict[str, Any], AfterValidator(_has_role)]] = Field(min_length=1)
    ground_truth: Any = None
    data_source: str | None = None
    tools: list[dict[str, Any]] | None = None
    structured: Structure | None = Field(
        None, description="structure of a response; None: as the task says"
    )
    images: list[Path | bytes] = Field(
        [], description="files or bytes, in the order in which the messages show them"
    )
    extra: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image in a prompt; `grid_thw`: its patches in time, height and width, or None."""

    file: ImageFile
    tokens: int
    grid_thw: list[int] | None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """int32[P] prompt ids, placeholders of images expanded, and the images in their order."""

    ids: NDArray[np.int32]
    images: list[ShownImage]

    @property
    def seed(self) -> bytes:
        """Return bytes that differ between any two prompts."""
        digests = [blake2b(image.file.data, digest_size=8).digest() for image in self.images]
        return b"".join([self.ids.tobytes(), *digests])


class Dataset(Protocol):
    """Rows 0 .. len - 1. A row number gives the same problem for as long as the run lives."""

    def __len__(self) -> int: ...

    def row(self, row: int, epoch: int = 0) -> Problem:
        """Return one problem; `epoch` matters to data sets whose order differs in each.

        Raises DatasetError for an unusable row, IndexError for a missing one.
        """
        ...
