"""Names and ids: runs, tasks, groups, nonces."""

from __future__ import annotations

import re
import secrets

from buffer.errors import ConfigError


def new_nonce() -> str:
    """128 random bits: what fences, since a server that rolled back hands out counters twice."""
    return secrets.token_hex(16)


NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GID = re.compile(r"(?P<task>[A-Za-z0-9_.-]+)-(?P<draw>\d{10})")

LANES = ("eval", "resume", "fresh")
"""Priorities of jobs, highest first."""

POOLS = ("completed", "aborted", "expired")
"""Statuses that have a pool."""

ENDS = ("archived", "filtered", "dropped")
"""Places without a record: a bit in a bitmap is all that is left of a group."""

IMPORTED_FROM = 2**25
"""Draws from here on number groups from outside (put, imported), so that those of the data set are
neither skipped nor doubled (I3). A bitmap of ended draws that reaches so far takes 4 MiB.
"""


def valid_name(kind: str, name: str) -> str:
    """`name`, if it may be part of a key; ConfigError says why not."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the {kind} name {name[:80]!r} cannot be used",
            hint="1 to 64 letters, digits, '_', '.' or '-'",
        )
    return name


def group_id(task: str, draw: int) -> str:
    """The id of the n-th draw of a task: derived, so the same draw always has the same id."""
    return f"{task}-{draw:010d}"


def split_group_id(gid: str) -> tuple[str, int]:
    """(task, draw) of a gid; ConfigError if it is none."""
    match = GID.fullmatch(gid)
    if match is None:
        raise ConfigError(f"{gid[:80]!r} is not a group id", hint="they look like math-0000001042")
    return match["task"], int(match["draw"])
