"""Which keys of a live run are damaged: every kind of `TABLE`, one by one, in each of two ways.

Groups and payloads are tried in every stage, and the manifest of the newest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from buffer.ids import ENDS
from buffer.redis.key_table import TABLE
from proofs.chaos.plan import INLINE, RUN

PREFIX = f"rmq:{{{RUN}}}:"
WAYS = ("deleted", "retyped")
UNUSED = (
    *("report", "bad_submissions", "age:<task>"),
    *("ended:<task>:filtered", "ended:<task>:dropped", "ended:<task>:skipped"),
    *("weights", "weights:<lineage>:<version>"),
)
"""Rows that the run of a trial has no keys of, or seldom: they are only given another type."""

Find = Callable[[Any], str]
"""Returns the name of a key that exists in the run of a client; "" if there is none now."""


@dataclass(frozen=True, slots=True)
class Target:
    """One key of the row `row` of `TABLE`, as `which` says where a row has several kinds."""

    row: str
    find: Find
    which: str = ""

    @property
    def is_used(self) -> bool:
        """Return whether the run of a trial has such keys: then one is waited for."""
        return self.row not in UNUSED and self.which != "unused"

    def __str__(self) -> str:
        return f"{self.row} {self.which}".strip()


def _named(row: str, name: str = "", which: str = "") -> Target:
    return Target(row, lambda client: name or row, which)


def waiting(client: Any) -> str:
    jobs = client.xrevrange(f"{PREFIX}jobs:{INLINE}:fresh", count=1)
    return jobs[0][1][b"gid"].decode() if jobs else ""


def running(client: Any) -> str:
    """Return the gid of a group that a worker generates."""
    held = [gid for key in client.scan_iter(f"{PREFIX}leased:*") for gid in client.hkeys(key)]
    return next((gid.decode() for gid in held if gid != b"digest"), "")


def completed(client: Any) -> str:
    """Return the gid of the completed group that is taken last."""
    members = client.zrange(f"{PREFIX}pool:{INLINE}:completed", -1, -1)
    return members[0].decode().partition(":")[2] if members else ""


def taken(client: Any) -> str:
    lines = client.lrange(f"{PREFIX}{newest_batch(client)}", 1, 1)
    return lines[0].decode().partition(" ")[0] if lines else ""


def newest_batch(client: Any) -> str:
    return f"batch:train:{int(client.hget(PREFIX + 'ledger:train', 'taken') or 0)}"


STAGES: Mapping[str, Find] = {
    "waiting": waiting,
    "running": running,
    "completed": completed,
    "taken": taken,
}


def _record(stage: str) -> Find:
    return lambda client: _after("group:", STAGES[stage](client))


def _payload(stage: str) -> Find:
    def find(client: Any) -> str:
        gid = STAGES[stage](client)
        token = client.hget(f"{PREFIX}group:{gid}", "payload")
        return f"payload:{gid}:{token.decode()}" if token else ""

    return find


def _after(start: str, rest: str) -> str:
    return start + rest if rest else ""


def _letter(client: Any) -> str:
    dead = client.zrange(f"{PREFIX}dead", 0, 0)
    return f"dead:{dead[0].decode()}" if dead else ""


def _holds(client: Any) -> str:
    keys = sorted(client.scan_iter(f"{PREFIX}leased:*"))
    return keys[0].decode().removeprefix(PREFIX) if keys else ""


TARGETS = (
    *(
        _named(row)
        for row in TABLE
        if "<" not in row and row not in ("meta", "control", "leases", "workers")
    ),
    _named("bell:<who>", "bell:workers"),
    _named("jobs:<task>:<lane>", f"jobs:{INLINE}:fresh"),
    _named("pool:<task>:<status>", f"pool:{INLINE}:completed"),
    _named("age:<task>", f"age:{INLINE}"),
    _named("progress:<task>", f"progress:{INLINE}"),
    *(_named(f"ended:<task>:{end}", f"ended:{INLINE}:{end}") for end in ENDS),
    _named("ledger:<name>", "ledger:train"),
    _named("ledger:<name>", "ledger:eval", "unused"),
    Target("batch:<name>:<step>", newest_batch),
    _named("worker:<id>", "worker:worker-0"),
    _named("tokens:<id>", "tokens:worker-0"),
    _named("skips:<task>", f"skips:{INLINE}"),
    _named("limit_caller:<caller>", "limit_caller:none", "unused"),
    Target("leased:<id>", _holds),
    Target("dead:<gid>", _letter),
    _named("weights:<lineage>:<version>", "weights:l0:1"),
    *(Target("group:<gid>", _record(stage), stage) for stage in STAGES),
    *(Target("payload:<gid>:<token>", _payload(stage), stage) for stage in STAGES),
    *map(_named, ("leases", "workers", "control", "meta")),
)


def strike(client: Any, target: Target, way: str) -> str:
    """Damage a key; return its name, or "" where there is none that could be deleted."""
    name = target.find(client)
    key = PREFIX + name
    if not name or (way == "deleted" and not client.exists(key)):
        return ""
    damage(client, key, way, is_string=TABLE[target.row].type == "STRING")
    return name


def damage(client: Any, key: str, way: str, *, is_string: bool) -> None:
    """Delete a key, or replace it by one of another type, at one instant."""
    pipe = client.pipeline(transaction=True)
    pipe.delete(key)
    if way == "retyped":
        pipe.hset(key, "junk", "1") if is_string else pipe.set(key, "junk")
    pipe.execute()
