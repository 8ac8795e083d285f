"""What a run looks like on the server, read with plain Redis commands: the tests' own eyes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis

NOT_STATE = ("clock", "bell:", "events")
TIMED_SETS = ("leases", "workers", "dead", "limit_callers")


def dump(client: redis.Redis, run: str) -> dict[str, Any]:
    """Every key of a run with its value, without what only tells the time."""
    keys = sorted(key for key in run_keys(client, run) if not _name(key).startswith(NOT_STATE))
    names = [_name(key) for key in keys]
    pipe: Any = client.pipeline(transaction=False)
    for key in keys:
        pipe.type(key)
    kinds = [kind.decode() for kind in pipe.execute()]
    for key, kind in zip(keys, kinds, strict=True):
        _read(pipe, kind, key)
        if kind == "string":
            pipe.ttl(key)
    replies = iter(pipe.execute())
    return {name: _state(kind, name, replies) for name, kind in zip(names, kinds, strict=True)}


def exact(client: redis.Redis, run: str) -> dict[str, Any]:
    keys = sorted(run_keys(client, run))
    pipe: Any = client.pipeline(transaction=False)
    for key in keys:
        pipe.type(key)
    for key, kind in zip(keys, pipe.execute(), strict=True):
        _read(pipe, kind.decode(), key)
    return dict(zip(keys, pipe.execute(), strict=True))


def run_keys(client: redis.Redis, run: str) -> list[str]:
    # behind its name: the end of the tag, or the group that a payload of a cluster lies with
    return [key.decode() for key in client.scan_iter(f"rmq:{{{run}[}}:]*", count=10_000)]


def payload_keys(client: redis.Redis, run: str) -> list[str]:
    return [key for key in run_keys(client, run) if _name(key).startswith("payload:")]


def _name(key: str) -> str:
    """Without prefix; a payload is called the same in a cluster and out of it."""
    tag, _, name = key.partition("}:")
    _, _, gid = tag.removeprefix("rmq:{").partition(":")
    return f"payload:{gid}:{name.removeprefix('payload:')}" if gid else name


def _read(pipe: Any, kind: str, key: str) -> None:
    match kind:
        case "hash":
            pipe.hgetall(key)
        case "zset":
            pipe.zrange(key, 0, -1, withscores=True)
        case "set":
            pipe.smembers(key)
        case "list":
            pipe.lrange(key, 0, -1)
        case "stream":
            pipe.xrange(key)
        case _:
            pipe.get(key)


def _state(kind: str, name: str, replies: Iterator[Any]) -> Any:
    value = next(replies)
    if kind == "hash":
        return {field: text for field, text in value.items() if not field.endswith(b"_ms")}
    if kind == "zset" and name in TIMED_SETS:
        return sorted(member for member, _ in value)
    return (value, next(replies) > 0) if kind == "string" else value


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values."""
    names = before.keys() | after.keys()
    return {
        n: (before.get(n), after.get(n)) for n in sorted(names) if before.get(n) != after.get(n)
    }
