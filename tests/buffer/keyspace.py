"""What a run looks like on the server, read with plain Redis commands: the tests' own eyes."""

from __future__ import annotations

from typing import Any

import redis

NOT_STATE = ("clock", "bell:", "events")
TIMED_SETS = ("leases", "workers", "dead")


def dump(client: redis.Redis, run: str) -> dict[str, Any]:
    """Every key of a run with its value, without what only tells the time."""
    prefix = f"rmq:{{{run}}}:"
    keys = sorted(key.decode() for key in client.scan_iter(f"{prefix}*", count=10_000))
    names = [name for name in (key.removeprefix(prefix) for key in keys) if not name.startswith(NOT_STATE)]
    pipe: Any = client.pipeline(transaction=False)
    for name in names:
        pipe.type(prefix + name)
    kinds = [kind.decode() for kind in pipe.execute()]
    for name, kind in zip(names, kinds, strict=True):
        _read(pipe, kind, prefix + name)
        pipe.ttl(prefix + name)
    replies = pipe.execute()
    return {
        name: _state(kind, name, replies[2 * i], replies[2 * i + 1])
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }


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


def _state(kind: str, name: str, value: Any, ttl: int) -> Any:
    if kind == "hash":
        return {field: text for field, text in value.items() if not field.endswith(b"_ms")}
    if kind == "zset" and name in TIMED_SETS:
        return sorted(member for member, _ in value)
    return (value, ttl > 0) if kind == "string" else value


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values."""
    names = before.keys() | after.keys()
    return {n: (before.get(n), after.get(n)) for n in sorted(names) if before.get(n) != after.get(n)}
