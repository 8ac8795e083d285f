"""Signed payloads: lines with signatures, then the bytes that are signed.

    signed by                                the first bytes; spaces up to a multiple of eight
    init producer <SHA-256> <MAC>            the prompt, if its producer has a key
    <token> gpu7 <SHA-256> <MAC>             an interrupted claim, if there was one
    <token> gpu8 <SHA-256> <MAC>             the claim that submitted these bytes
                                             an empty line

A reader inspects the bytes: no msgpack map and no zstd frame begins like this. The process that
adds a line has read the payload that ends with the line before, and has checked that this line has
its token and SHA-256. So a trainer can check who made each part, without the earlier bytes.
`buffer.redis.signing` makes and checks MACs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from buffer.errors import WireError

MAGIC = b"signed by"

ALIGNMENT = 8
"""Columns of the document stay aligned."""

LONGEST = 64 * 2**10
"""Bytes of all lines: enough for hundreds of interruptions."""

Data = bytes | memoryview

_LINE = re.compile(r"(\S{1,128}) ([\w.-]{1,64}) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII)


class Line(NamedTuple):
    """One signature: who signed the bytes with this SHA-256 under this token."""

    token: str
    worker: str
    digest: str
    mac: str

    @classmethod
    def parse(cls, text: str) -> Line:
        """Return the signature in a line. Raises WireError."""
        match = _LINE.fullmatch(text)
        if match is None:
            raise WireError(f"{text[:200]!r} is not the line of a signature")
        return cls(*match.groups())


def signed_block(lines: Sequence[str]) -> bytes:
    """Return the lines as they stand before the bytes that they sign. Raises WireError."""
    text = "".join(f"\n{line}" for line in lines).encode("ascii") + b"\n\n"
    if len(text) > LONGEST - len(MAGIC) - ALIGNMENT:
        raise WireError(f"the group has {len(lines)} signatures", hint="start it from its prompt")
    return MAGIC + b" " * (-(len(MAGIC) + len(text)) % ALIGNMENT) + text


def split_signed(data: Data) -> tuple[tuple[str, ...], Data]:
    """Return the lines of a payload, and the bytes behind them; no lines where it is not signed.

    Raises WireError.
    """
    if data[: len(MAGIC)] != MAGIC:
        return (), data
    head, end, _ = bytes(data[:LONGEST]).partition(b"\n\n")
    if not (end and head.isascii()):
        raise WireError("the signatures of the payload have no end")
    return tuple(head.decode().split("\n")[1:]), memoryview(data)[len(head + end) :]


def signers(lines: Sequence[str]) -> list[str]:
    """Return who signed the rollouts of a group, one name per claim, without its producer."""
    found = [Line.parse(line) for line in lines]
    return [line.worker for line in found if line.token != "init"]
