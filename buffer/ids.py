from __future__ import annotations

import re
import secrets
from hashlib import blake2b

from buffer.errors import ConfigError


def new_nonce() -> str:
    """Return 128 random bits in hex: a server that rolled back repeats counters, not nonces."""
    return secrets.token_hex(16)


NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GID = re.compile(r"(?P<task>[A-Za-z0-9_.-]+)-(?P<draw>\d{10})")

LANES = ("eval", "resume", "fresh")  # priorities of jobs, highest first

POOLS = ("completed", "aborted", "expired")  # statuses that have a pool

ENDS = ("archived", "filtered", "dropped", "skipped")  # a bit in a bitmap remains, no record

IMPORTED_FROM = 2**25
"""The first draw of put and imported groups (I3); a bitmap of ended draws up to it takes 4 MiB."""


def valid_name(kind: str, name: str) -> str:
    """Return `name` if it may be part of a Redis key; otherwise, raise ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the {kind} name {name[:80]!r} cannot be used",
            hint="use 1 to 64 letters, digits, '_', '.' or '-'",
        )
    return name


def group_id(task: str, draw: int) -> str:
    return f"{task}-{draw:010d}"


def split_group_id(gid: str) -> tuple[str, int]:
    """Return (task, draw) of a group id. Raises ConfigError for other text."""
    match = GID.fullmatch(gid)
    if match is None:
        raise ConfigError(
            f"{gid[:80]!r} is not a group id", hint="group ids have the form math-0000001042"
        )
    return match["task"], int(match["draw"])


def trace_id(run_nonce: str, gid: str) -> str:
    """Return the id of a group's trace: 16 bytes in hexadecimal (W3C Trace Context)."""
    return blake2b(f"{run_nonce}/{gid}".encode(), digest_size=16).hexdigest()
