"""Names and ids: runs, tasks, groups, nonces."""

from __future__ import annotations

import re
import secrets

from buffer.errors import ConfigError


def new_nonce() -> str:
    """Return 128 random bits in hex.

    Fencing compares nonces and not counters, because a server that rolled back repeats counters.
    """
    return secrets.token_hex(16)


NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GID = re.compile(r"(?P<task>[A-Za-z0-9_.-]+)-(?P<draw>\d{10})")

LANES = ("eval", "resume", "fresh")
"""Priorities of jobs, highest first."""

POOLS = ("completed", "aborted", "expired")
"""Statuses that have a pool."""

ENDS = ("archived", "filtered", "dropped")
"""Final stages: the record of the group is gone, a bit in a bitmap remains."""

IMPORTED_FROM = 2**25
"""The first draw of groups from outside (put, imported), so that draws of the data set are neither
skipped nor repeated (I3). A bitmap of ended draws up to it takes 4 MiB.
"""


def valid_name(kind: str, name: str) -> str:
    """Return `name` if it may be part of a Redis key; otherwise, raise ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the {kind} name {name[:80]!r} cannot be used",
            hint="use 1 to 64 letters, digits, '_', '.' or '-'",
        )
    return name


def group_id(task: str, draw: int) -> str:
    """Return the id of a draw of a task; the same draw always has the same id."""
    return f"{task}-{draw:010d}"


def split_group_id(gid: str) -> tuple[str, int]:
    """Return (task, draw) of a group id. Raises ConfigError for other text."""
    match = GID.fullmatch(gid)
    if match is None:
        raise ConfigError(
            f"{gid[:80]!r} is not a group id", hint="group ids have the form math-0000001042"
        )
    return match["task"], int(match["draw"])
