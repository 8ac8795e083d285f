"""What bytes of a safetensors file hold, read from its header: where each tensor lies, without torch.

Invariant: a tensor that is told lies within the bytes. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

from buffer.errors import WireError


class TensorPlace(NamedTuple):
    """`dtype` in the format's words ("F32", "BF16"), `start` and `end` in bytes of the whole file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def places_of(data: memoryview) -> dict[str, TensorPlace]:
    """Every tensor of a file by its name. Raises WireError where the bytes are no whole safetensors file."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = orjson.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        places = {name: _place(facts, 8 + length) for name, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"these are not the bytes of a safetensors file: {error!r}") from error
    if max((place.end for place in places.values()), default=8 + length) != len(data):
        raise WireError(f"{len(data)} bytes are not what the safetensors header in them says")
    return places


def _place(facts: dict[str, list[int]], first: int) -> TensorPlace:
    start, end = (int(offset) for offset in facts["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError(f"a tensor from byte {start} to {end}")
    return TensorPlace(str(facts["dtype"]), tuple(int(n) for n in facts["shape"]), first + start, first + end)
