"""Compresses payloads with zstd, where a run asks for it (`[memory] compression`).

A zstd frame begins with 28 B5 2F FD, and no msgpack map does: a reader inspects the bytes and not
the settings of the run, which may change. A frame is not trusted: it must state the size of its
content, which is checked before memory is allocated. `zstandard` (extra `zstd`) is only needed
where there are such bytes.
"""

from __future__ import annotations

from typing import Any, Literal

from buffer.errors import ConfigError, WireError
from buffer.wire.signed_bytes import split_signed

Compression = Literal["none", "zstd"]

MAX_BYTES = 256 * 2**20
"""A larger document is refused before it is read."""

MAGIC = bytes.fromhex("28b52ffd")

LEVEL = 1
"""Higher levels cost several times as much for a few percent, since token ids and logprobs have
little redundancy.
"""


def compress(data: bytes, method: Compression) -> bytes:
    """Return the bytes to store for `data`."""
    if method == "none":
        return data
    packed: bytes = zstandard().ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)
    return packed


def expand(data: bytes | memoryview) -> bytes | memoryview:
    """Return the document in a payload, which may be signed, or in a zstd frame.

    Raises:
        WireError: frame or signatures are damaged, or the size is unknown or too large.
        ConfigError: `zstandard` is not installed.
    """
    data = split_signed(data)[1]
    if bytes(data[:4]) != MAGIC:
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
    """Return the package `zstandard`. Raises ConfigError where it is not installed."""
    try:
        import zstandard as module
    except ImportError as error:
        raise ConfigError(
            "the payloads of this run are compressed, and the package zstandard is not installed",
            hint="pip install zstandard",
        ) from error
    return module
