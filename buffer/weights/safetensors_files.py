"""The header of a safetensors file: where each tensor lies, without torch.

Format: https://github.com/huggingface/safetensors#format. Headers come from strangers as well: whatever is wrong with
one is a ValueError.
"""

from __future__ import annotations

from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from buffer.errors import ModelError, WireError

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


BLOCKS, BLOCK_BYTES = 4, 4096
"""What is read of a tensor for a model's checksum: so many blocks, evenly spaced. All of it, where that is less."""


def weight_files(folder: Path) -> list[Path]:
    """The files that make up one checkpoint: the shards that an index names, else all there are. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(orjson.loads(index.read_bytes())["weight_map"].values())
        except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of weights: {error!r}") from error
        files = [folder / str(name) for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors", hint="save it with safetensors, not as a pickle")
    return files


def model_checksum(folder: Path) -> str:
    """Which weights `folder` holds: BLAKE2b, 16 bytes in hex, however they are cut into files. Raises ModelError.

    Of each tensor name, type, shape and some blocks: a second or two for a large model. That tells models apart
    (training moves nearly every number); whether a file is whole is the business of manifest.py.
    """
    digests: dict[str, bytes] = {}
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                digests |= {name: _digest(stream, place) for name, place in read_header(stream).places.items()}
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} is no safetensors file: {error!r}", hint="is the copy complete?") from error
    whole = blake2b(digest_size=16)
    for name in sorted(digests):
        whole.update(name.encode() + b"\0" + digests[name])
    return whole.hexdigest()


def _digest(stream: IO[bytes], tensor: TensorPlace) -> bytes:
    digest = blake2b(orjson.dumps([tensor.dtype, tensor.shape]), digest_size=16)
    size = tensor.end - tensor.start
    step = max(size // BLOCKS, 1)
    all_of_it = size <= BLOCKS * BLOCK_BYTES
    for block in range(0, size, BLOCK_BYTES) if all_of_it else range(0, BLOCKS * step, step):
        stream.seek(tensor.start + block)
        digest.update(stream.read(min(BLOCK_BYTES, size - block)))
    return digest.digest()


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

STEM = "base_model.model."
"""What PEFT puts before the name of a layer."""

BASE = "rolloutmq_base"
"""In the metadata of its tensors: the checksum of the model that it is for (`model_checksum`)."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()
