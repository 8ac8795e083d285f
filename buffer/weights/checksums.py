"""Checksums of the files of weights, part by part: in parallel, and while the bytes are at hand.

A safetensors file has a part for its header and one for each tensor; any other file is one part.
xxh3 (128 bits) finds every accident at many times the speed of memory copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from buffer.errors import WireError
from buffer.weights.safetensors_files import read_header

BLOCK_BYTES = 1 << 20  # bytes at a time: they stay in the processor's cache

THREADS = min(8, os.cpu_count() or 1)


ALGORITHM = "xxh3"


class FilePart(NamedTuple):
    """A part of a file: its size, and its checksum in hex. The parts of a file have no gaps."""

    bytes: int
    checksum: str


class FileChecksums(NamedTuple):
    bytes: int
    parts: tuple[FilePart, ...]

    def to_json(self) -> dict[str, Any]:
        parts = [list(part) for part in self.parts]
        return {"bytes": self.bytes, "algorithm": ALGORITHM, "parts": parts}

    @classmethod
    def parse(cls, facts: Mapping[str, Any]) -> FileChecksums:
        """Return the facts in a decoded JSON object. Raises WireError."""
        try:
            parts = tuple(FilePart(int(size), str(checksum)) for size, checksum in facts["parts"])
            found = cls(int(facts["bytes"]), parts)
            algorithm = facts["algorithm"]
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"not the facts of a file of weights: {error!r}") from error
        if algorithm != ALGORITHM:
            hint = "update this process: the publisher runs a newer version"
            raise WireError(f"unknown checksum algorithm {algorithm!r}", hint=hint)
        if min([0, *(part.bytes for part in parts)]) < 0 or found.bytes != sum(
            part.bytes for part in parts
        ):
            raise WireError(f"the parts of a file of weights do not add up to {found.bytes} bytes")
        return found


class WrittenFiles(dict[str, FileChecksums]):
    """Facts, by name, of files that were hashed while they were written."""


def hash_files(files: Iterable[Path]) -> dict[str, FileChecksums]:
    found = {}
    for file in files:
        size = file.stat().st_size
        try:
            with file.open("rb") as stream:
                ends = {span.end for span in read_header(stream).tensors.values()}
                ends.add(stream.tell())
        except ValueError:  # not a safetensors file: one part
            ends = set()
        edges = [0, *sorted(end for end in ends if 0 < end < size), size]
        found[file.name] = _hash_file(file, [end - start for start, end in pairwise(edges)])
    return found


def check_file(file: Path, facts: FileChecksums) -> None:
    """Raise WireError or OSError unless `file` is as `facts` describe."""
    size = file.stat().st_size
    if size != facts.bytes:
        raise WireError(f"{file.name} has {size} bytes, expected {facts.bytes}")
    if _hash_file(file, [part.bytes for part in facts.parts]) != facts:
        raise WireError(f"{file.name} differs from its checksum in the manifest")


def starts_of(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _hash_file(file: Path, sizes: Sequence[int]) -> FileChecksums:
    with file.open("rb") as stream, ThreadPoolExecutor(THREADS) as pool:
        hash_part = partial(_hash_part, stream.fileno())
        parts = tuple(pool.map(hash_part, starts_of(sizes), sizes))
    return FileChecksums(sum(sizes), parts)


def _hash_part(descriptor: int, start: int, size: int) -> FilePart:
    found = xxhash.xxh3_128()
    block = memoryview(bytearray(min(size, BLOCK_BYTES)))
    end = start + size
    while start < end:
        count = os.preadv(descriptor, [block[: end - start]], start)
        if not count:
            raise WireError(f"a file of weights became shorter while it was read, at byte {start}")
        found.update(block[:count])
        start += count
    return FilePart(size, found.hexdigest())


ALIGNMENT = 8  # the header is padded to a multiple of it, as safetensors does


class RawTensor(NamedTuple):
    """A tensor in memory. `dtype` is the format's name ("BF16"), `data` its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_tensors(
    file: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]
) -> FileChecksums:
    """Write a safetensors file, and hash each block while the processor's cache still has it."""
    data = [tensor.data for tensor in tensors.values()]
    starts = starts_of([part.nbytes for part in data])
    entries = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, start + tensor.data.nbytes],
        }
        for (name, tensor), start in zip(tensors.items(), starts, strict=True)
    }
    header = orjson.dumps({"__metadata__": dict(metadata), **entries})
    header += b" " * (-len(header) % ALIGNMENT)
    parts = [memoryview(len(header).to_bytes(8, "little") + header), *data]
    sizes = [part.nbytes for part in parts]
    with file.open("xb") as stream, ThreadPoolExecutor(THREADS) as pool:
        write = partial(_write_part, stream.fileno())
        written = tuple(pool.map(write, starts_of(sizes), parts))
    return FileChecksums(sum(sizes), tuple(part for part in written if part.bytes))


def write_at(descriptor: int, start: int, data: memoryview) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, start)
        start += written
        data = data[written:]


def _write_part(descriptor: int, start: int, data: memoryview) -> FilePart:
    found = xxhash.xxh3_128()
    for offset in range(0, data.nbytes, BLOCK_BYTES):
        block = data[offset : offset + BLOCK_BYTES]
        found.update(block)
        write_at(descriptor, start + offset, block)
    return FilePart(data.nbytes, found.hexdigest())
