"""Frames around the document of a group: a zstd frame, and the list of a group's turns.

Readers inspect the bytes, not the settings of the run, which may change: no msgpack map begins like
one of the two. A zstd frame must state the size of its content, which is checked before it is
expanded.

The payload of a group whose agents are at work is a list of such documents: the group as it was
claimed, then one per turn (`split_turns`), in the order in which they were kept.

    turns of        the first eight bytes
    <size> <bytes>  of each: uint64, little-endian; zeros up to a multiple of eight
"""

from __future__ import annotations

import struct
from typing import Any, Literal

from buffer.errors import ConfigError, WireError

Compression = Literal["none", "zstd"]

MAX_BYTES = 256 * 2**20

ZSTD_MAGIC = bytes.fromhex("28b52ffd")

LEVEL = 1  # higher levels cost much time for a few percent: token ids are hardly redundant

TURNS_MAGIC = b"turns of"

ALIGNMENT = 8  # columns of the document stay aligned

Data = bytes | memoryview

_SIZE = struct.Struct("<Q")


def framed(document: Data) -> bytes:
    """Return a document as it stands in a list of documents."""
    return _SIZE.pack(len(document)) + document + bytes(-len(document) % ALIGNMENT)


def split_turns(data: Data) -> list[Data]:
    """Return the documents of a payload: one, unless its agents are at work. Raises WireError."""
    if bytes(data[:ALIGNMENT]) != TURNS_MAGIC:
        return [data]
    found: list[Data] = []
    rest = memoryview(data)[ALIGNMENT:]
    while len(rest):
        size = _SIZE.unpack_from(rest)[0] if len(rest) >= _SIZE.size else MAX_BYTES
        end = _SIZE.size + size + -size % ALIGNMENT
        if end > len(rest):
            raise WireError("a turn of the payload is cut off")
        found.append(rest[_SIZE.size : _SIZE.size + size])
        rest = rest[end:]
    if not found:
        raise WireError("the payload has no group before its turns")
    return found


def compress(data: bytes, method: Compression) -> bytes:
    if method == "none":
        return data
    packed: bytes = zstandard().ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)
    return packed


def expand(data: Data) -> Data:
    """Return the document in a payload. Raises WireError, or ConfigError without `zstandard`."""
    if bytes(data[:4]) != ZSTD_MAGIC:
        return data
    module = zstandard()
    try:
        size = module.get_frame_parameters(data).content_size
        if size in (module.CONTENTSIZE_UNKNOWN, module.CONTENTSIZE_ERROR):
            raise WireError(
                "the zstd frame does not state the size of its content",
                hint="compress it with the content size in the frame header",
            )
        if size > MAX_BYTES:
            raise WireError(
                f"the content of the zstd frame has {size} bytes",
                hint=f"at most {MAX_BYTES} are accepted",
            )
        document: bytes = module.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except module.ZstdError as error:
        raise WireError(f"the zstd frame is damaged: {error}") from error
    return document


def zstandard() -> Any:
    try:
        import zstandard as module
    except ImportError as error:
        raise ConfigError(
            "the payloads of this run are compressed, and the package zstandard is not installed",
            hint="pip install zstandard",
        ) from error
    return module
