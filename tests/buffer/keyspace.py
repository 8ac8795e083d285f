"""What a run looks like on the server, read with plain Redis commands: the tests' own eyes."""

from __future__ import annotations

from typing import Any

import redis

NOT_STATE = ("clock", "bell:", "events")
TIMED_SETS = ("leases", "workers", "dead")


def dump(client: redis.Redis, run: str) -> dict[str, Any]:
    """Every key of a run with its value, without what only tells the time."""
    prefix = f"rmq:{{{run}}}:"
    keys = sorted(key.decode() for key in client.scan_iter(f"{prefix}*", count=1000))
    names = [key.removeprefix(prefix) for key in keys]
    kept = [name for name in names if not name.startswith(NOT_STATE)]
    return {name: _value(client, prefix + name, name) for name in kept}


def _value(client: Any, key: str, name: str) -> Any:
    match client.type(key):
        case b"hash":
            fields = client.hgetall(key)
            return {field: value for field, value in fields.items() if not field.endswith(b"_ms")}
        case b"zset":
            members = client.zrange(key, 0, -1, withscores=True)
            return sorted(member for member, _ in members) if name in TIMED_SETS else members
        case b"set":
            return client.smembers(key)
        case b"list":
            return client.lrange(key, 0, -1)
        case b"stream":
            return client.xrange(key)
    return client.get(key), client.ttl(key) > 0


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, with both values."""
    names = before.keys() | after.keys()
    return {n: (before.get(n), after.get(n)) for n in sorted(names) if before.get(n) != after.get(n)}
