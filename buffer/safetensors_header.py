"""The header of a safetensors file: where each tensor lies, without torch.

Format: https://github.com/huggingface/safetensors#format. Headers come from strangers as well: whatever is wrong with
one is a ValueError.
"""

from __future__ import annotations

from io import BytesIO
from typing import IO, Any, NamedTuple

import orjson

from buffer.errors import WireError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself


class TensorPlace(NamedTuple):
    """`dtype` in the format's words ("F32", "BF16"), `start` and `end` in bytes of the whole file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """`bytes`: what the whole file has."""

    places: dict[str, TensorPlace]
    metadata: dict[str, Any]
    bytes: int


def read_header(stream: IO[bytes]) -> Header:
    """Of a file that is read from its beginning. Raises ValueError, OSError."""
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise ValueError(f"impossible header of {length} bytes")
    header = orjson.loads(stream.read(length))
    try:
        metadata = dict(header.pop("__metadata__", {}))
        places = {name: _place(facts, 8 + length) for name, facts in header.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no header of tensors: {error!r}") from error
    return Header(places, metadata, max((place.end for place in places.values()), default=8 + length))


def places_of(data: memoryview) -> dict[str, TensorPlace]:
    """Every tensor of a file by its name. Raises WireError where the bytes are no whole safetensors file."""
    end_of_header = 8 + min(int.from_bytes(data[:8], "little"), MAX_HEADER_BYTES)
    try:
        header = read_header(BytesIO(data[:end_of_header]))
    except ValueError as error:
        raise WireError(f"these are not the bytes of a safetensors file: {error}") from error
    if header.bytes != len(data):
        raise WireError(f"{len(data)} bytes are not what the safetensors header in them says")
    return header.places


def _place(facts: dict[str, list[int]], first: int) -> TensorPlace:
    start, end = (int(offset) for offset in facts["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError(f"a tensor from byte {start} to {end}")
    return TensorPlace(str(facts["dtype"]), tuple(int(n) for n in facts["shape"]), first + start, first + end)
