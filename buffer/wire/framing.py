"""Frames around the document of a group: lines with signatures, and a zstd frame.

    signed by                                the first bytes; spaces up to a multiple of eight
    init producer <SHA-256> <MAC>            the prompt, if its producer has a key
    <token> gpu7 <SHA-256> <MAC>             an interrupted claim, if there was one
    <token> gpu8 <SHA-256> <MAC>             the claim that submitted these bytes
                                             an empty line

Readers inspect the bytes, not the settings of the run, which may change: no msgpack map begins like
one of the two. A process adds a line after it has checked that the line before matches the payload
it has read, so a trainer can check each part without the earlier bytes. `buffer.redis.signing`
makes the MACs. A zstd frame must state the size of its content, which is checked before it is
expanded.

The payload of a group whose agents are at work is a list of such documents: the group as it was
claimed, then one per turn (`split_turns`), in the order in which they were kept.

    turns of        the first eight bytes
    <size> <bytes>  of each: uint64, little-endian; zeros up to a multiple of eight
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from buffer.errors import ConfigError, WireError

Compression = Literal["none", "zstd"]

MAX_BYTES = 256 * 2**20

ZSTD_MAGIC = bytes.fromhex("28b52ffd")

LEVEL = 1  # higher levels cost much time for a few percent: token ids are hardly redundant

SIGNED_MAGIC = b"signed by"

TURNS_MAGIC = b"turns of"

ALIGNMENT = 8  # columns of the document stay aligned

LONGEST = 64 * 2**10  # bytes of all lines: enough for hundreds of interruptions

Data = bytes | memoryview

_SIZE = struct.Struct("<Q")

_LINE = re.compile(r"(\S{1,128}) ([\w.-]{1,64}) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII)


class Line(NamedTuple):
    """One signature: who signed the bytes with this SHA-256 under this token."""

    token: str
    worker: str
    digest: str
    mac: str

    @classmethod
    def parse(cls, text: str) -> Line:
        match = _LINE.fullmatch(text)
        if match is None:
            raise WireError(f"{text[:200]!r} is not the line of a signature")
        return cls(*match.groups())


def signed_block(lines: Sequence[str]) -> bytes:
    """Return the lines as they stand before the bytes that they sign. Raises WireError."""
    text = "".join(f"\n{line}" for line in lines).encode("ascii") + b"\n\n"
    if len(text) > LONGEST - len(SIGNED_MAGIC) - ALIGNMENT:
        raise WireError(f"the group has {len(lines)} signatures", hint="start it from its prompt")
    return SIGNED_MAGIC + b" " * (-(len(SIGNED_MAGIC) + len(text)) % ALIGNMENT) + text


def split_signed(data: Data) -> tuple[tuple[str, ...], Data]:
    """Split a payload into its signature lines and the bytes behind them. Raises WireError."""
    if data[: len(SIGNED_MAGIC)] != SIGNED_MAGIC:
        return (), data
    head, end, _ = bytes(data[:LONGEST]).partition(b"\n\n")
    if not (end and head.isascii()):
        raise WireError("the signatures of the payload have no end")
    return tuple(head.decode().split("\n")[1:]), memoryview(data)[len(head + end) :]


def signers(lines: Sequence[str]) -> list[str]:
    """Return who signed the rollouts of a group, one name per claim, without its producer."""
    found = [Line.parse(line) for line in lines]
    return [line.worker for line in found if line.token != "init"]


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
    data = split_signed(data)[1]
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
