"""Write a safetensors file, and hash each block while the processor's cache still has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson

from buffer.weights.checksums import (
    BLOCK_BYTES,
    THREADS,
    Algorithm,
    FileChecksums,
    Part,
    new_hash,
    starts_of,
)

ALIGNMENT = 8  # the header is padded to a multiple of it, as safetensors does


class RawTensor(NamedTuple):
    """A tensor in memory. `dtype` is the format's name ("BF16"), `data` its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_tensors(
    file: Path,
    tensors: Mapping[str, RawTensor],
    metadata: Mapping[str, str],
    algorithm: Algorithm,
) -> FileChecksums:
    header = _header(tensors, metadata)
    parts = [memoryview(header), *(tensor.data for tensor in tensors.values())]
    sizes = [part.nbytes for part in parts]
    with file.open("xb") as stream, ThreadPoolExecutor(THREADS) as pool:
        write = partial(_write_part, stream.fileno(), algorithm)
        written = tuple(pool.map(write, starts_of(sizes), parts))
    return FileChecksums(sum(sizes), algorithm, tuple(part for part in written if part.bytes))


def write_at(descriptor: int, start: int, data: memoryview) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, start)
        start += written
        data = data[written:]


def _header(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> bytes:
    sizes = [tensor.data.nbytes for tensor in tensors.values()]
    entries = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, start + tensor.data.nbytes],
        }
        for (name, tensor), start in zip(tensors.items(), starts_of(sizes), strict=True)
    }
    text = orjson.dumps({"__metadata__": dict(metadata), **entries})
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_part(descriptor: int, algorithm: Algorithm, start: int, data: memoryview) -> Part:
    found = new_hash(algorithm)
    for offset in range(0, data.nbytes, BLOCK_BYTES):
        block = data[offset : offset + BLOCK_BYTES]
        found.update(block)
        write_at(descriptor, start + offset, block)
    return Part(data.nbytes, found.hexdigest())
