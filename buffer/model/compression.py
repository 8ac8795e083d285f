"""Payloads compressed with zstd, where a run says so (`[memory] compression`).

They describe themselves: a zstd frame begins with 28 B5 2F FD, and no msgpack map does. So a reader
looks at the bytes and not at the run, and a run may change its mind. Nothing of a frame is trusted:
it must say how large its content is, and that is checked before memory is set aside for it. Needs
`zstandard` (extra `zstd`) only where such bytes are met.
"""

from __future__ import annotations

from typing import Any, Literal

from buffer.errors import ConfigError, WireError

Compression = Literal["none", "zstd"]

MAGIC = bytes.fromhex("28b52ffd")

LEVEL = 1
"""Higher ones cost several times as much for a few percent: token ids and logprobs have little to
find.
"""


def compress(data: bytes, method: Compression) -> bytes:
    """The bytes to store."""
    if method == "none":
        return data
    packed: bytes = zstandard().ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)
    return packed


def expand(data: bytes | memoryview) -> bytes | memoryview:
    """The document in these bytes: themselves, unless they are a zstd frame.

    Raises:
        WireError: a frame that is damaged, does not say its size, or says one that no document may have.
        ConfigError: `zstandard` is not installed.
    """
    if bytes(data[:4]) != MAGIC:
        return data
    module = zstandard()
    try:
        size = module.get_frame_parameters(data).content_size
        if size in (module.CONTENTSIZE_UNKNOWN, module.CONTENTSIZE_ERROR):
            raise WireError(
                "a zstd frame that does not say how large its content is",
                hint="write the content size",
            )
        if size > MAX_BYTES:
            raise WireError(f"a zstd frame of {size} bytes", hint=f"at most {MAX_BYTES}")
        document: bytes = module.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except module.ZstdError as error:
        raise WireError(f"not a whole zstd frame: {error}") from error
    return document


def zstandard() -> Any:
    """The package; ConfigError where it is not installed."""
    try:
        import zstandard as module
    except ImportError as error:
        raise ConfigError(
            "the payloads of this run are compressed with zstd, and the package zstandard is not installed",
            hint="pip install 'rolloutmq[zstd]'",
        ) from error
    return module


MAX_BYTES = 256 * 2**20
"""A larger document is refused unread."""
