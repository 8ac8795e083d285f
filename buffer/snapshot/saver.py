"""Save a run that rests: each of its keys as it is, and the files beside it.

A run rests while it is paused and no worker holds a group, or after everything has stopped. Each
move of a group logs an event: a copy during which one was logged is discarded.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgpack

from buffer.errors import SnapshotError
from buffer.ledger.account import Account
from buffer.redis.bulk_io import Command
from buffer.redis.key_table import row_of
from buffer.redis.keys import Keys
from buffer.redis.scripts import Advance
from buffer.redis.store import RunContext, Store
from buffer.snapshot.folder import FILES, KEYS, Item, SnapshotFacts, new_snapshot, seal

KEYS_AT_ONCE = 50  # in one round trip: a payload's key has up to 1 MB

_READ: dict[str, tuple[str | int, ...]] = {
    "hash": ("HGETALL",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "stream": ("XRANGE", "-", "+"),
    "string": ("GET",),
}
"""By type: the command, and what follows the key. Every value fits into memory."""

_ROLES = {
    f"{role}{suffix}".encode()
    for role in ("trainer", "producer")
    for suffix in ("", "_seen_ms", "_waited_ms", "_pause_ms", "_pause_buckets",
                   "_turns", "_doing", "_doing_ms", "_closed")
}  # fmt: skip
"""Fields of `control` of the process that holds a role: a restored run has none."""


def save(context: RunContext, files: Path | None, folder: Path, advance: Advance) -> SnapshotFacts:
    """Write a new folder; `files`: the folder of large columns.

    Raises SnapshotError, and leaves no folder, if the run does not rest.
    """
    store, keys, _, _ = context
    newest = ("XREVRANGE", keys.events, "+", "-", "COUNT", 1)
    before = store.ask("save", *newest)
    saved = 0
    with new_snapshot(folder) as hidden:
        _check(context)
        with (hidden / KEYS).open("wb") as stream:
            for item in _items(store, keys):
                stream.write(msgpack.packb(item))
                saved += 1
                advance("keys", saved)
        if files and files.is_dir():
            shutil.copytree(files, hidden / FILES)
        if store.ask("save", *newest) != before:
            raise SnapshotError(
                f"run {keys.run!r} changed while it was copied; nothing was kept",
                hint="pause or stop the run, and save it again",
                command_hint="save it again with --pause",
            )
        return seal(hidden, keys.run, time.time_ns() // 1_000_000, saved)


def _check(context: RunContext) -> None:
    """Raise SnapshotError if groups run, or the run is damaged."""
    name = context.keys.run
    found = Account(context).fsck()
    if running := sum(task.running for task in found.tasks):
        raise SnapshotError(
            f"{running} groups of run {name!r} are running; nothing was saved",
            hint="pause or stop the run; groups of dead workers come back when their leases end",
            command_hint="add --pause; groups of dead workers come back when their leases end",
        )
    if not found.clean:
        faults = [*found.faults, *(f"{one.gid}: {one.text}" for one in found.damage)]
        what = "; ".join(faults[:5]) or f"{len(found.lost)} lost, {len(found.doubled)} doubled"
        raise SnapshotError(
            f"run {name!r} does not add up: {what}; nothing was saved",
            hint="`rolloutmq fsck` lists all that is wrong",
        )


def _items(store: Store, keys: Keys) -> Iterator[Item]:
    # first the list of what may be deleted, since a janitor deletes it and then its entry
    garbage = keys.garbage.encode()
    others = (n for n in store.client.scan_iter(f"{keys.prefix}*", count=1000) if n != garbage)
    names = chain([garbage], others)
    wanted = (name for name in names if (row := row_of(name.decode())) and row.saved)
    while some := list(islice(wanted, KEYS_AT_ONCE)):
        facts = store.send("save", [(ask, name) for name in some for ask in ("TYPE", "PTTL")])
        # bytes with an expiry are those that no script has accepted; a key without a type is gone
        there = [
            (name, kind.decode())
            for name, kind, lifetime_ms in zip(some, facts[::2], facts[1::2], strict=True)
            if kind.decode() in _READ and lifetime_ms < 0
        ]
        reads: list[Command] = [(_READ[kind][0], name, *_READ[kind][1:]) for name, kind in there]
        for (name, kind), found in zip(there, store.send("save", reads), strict=True):
            key = name.decode().removeprefix(keys.prefix)
            if key == "control":
                found = {field: value for field, value in found.items() if field not in _ROLES}
            yield Item(kind, key, found if kind == "string" else list(_parts(found)))


def _parts(found: Any) -> Iterator[Any]:
    """Yield the parts of a hash, list, set or sorted set, flat; of a stream, entry by entry."""
    for part in found.items() if isinstance(found, dict) else found:
        if isinstance(part, (list, tuple)) and isinstance(part[1], dict):
            yield [part[0], list(_parts(part[1]))]
        elif isinstance(part, (list, tuple)):
            yield from part
        else:
            yield part
