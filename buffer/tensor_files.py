"""The safetensors files of a model folder: which they are, and whose weights they hold. No torch."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import IO

import orjson

from buffer.errors import ModelError
from buffer.safetensors_header import TensorPlace, read_header

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
    (training moves nearly every number); whether a file is whole is the business of weights_manifest.py.
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
