"""A copy of the keys that a repair changes, in a file from which they can be put back.

line 1    {"run", "nonce", "operation", "created_ms"}
others    {"key", "dump": what DUMP returned, base64, or null where there was no key, "ttl_ms"}
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from buffer.errors import SnapshotError


class SavedKey(NamedTuple):
    """One key as it was; `dump` is None where it did not exist."""

    key: str
    dump: bytes | None
    ttl_ms: int


class Backup(NamedTuple):
    """What a file holds: of which run and repair, and the keys."""

    nonce: str
    operation: str
    keys: list[SavedKey]


def write_backup(path: Path, head: dict[str, str | int], keys: Iterable[SavedKey]) -> None:
    """Write a new file, to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(orjson.dumps(head) + b"\n")
        for saved in keys:
            dump = None if saved.dump is None else base64.b64encode(saved.dump).decode()
            line = {"key": saved.key, "dump": dump, "ttl_ms": saved.ttl_ms}
            file.write(orjson.dumps(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_backup(path: Path) -> Backup:
    """Read the file of a repair. Raises SnapshotError where it is not one."""
    try:
        with path.open("rb") as file:
            head = orjson.loads(file.readline())
            return Backup(head["nonce"], head["operation"], list(_keys(file)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"{path} is not the copy that a repair made: {error}",
            hint="give the file that `rolloutmq fsck --repair` named",
        ) from error


def _keys(lines: Iterable[bytes]) -> Iterator[SavedKey]:
    for line in lines:
        saved = orjson.loads(line)
        dump = saved["dump"]
        raw = None if dump is None else base64.b64decode(dump)
        yield SavedKey(saved["key"], raw, saved["ttl_ms"])
