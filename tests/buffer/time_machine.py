"""Puts the key space of a run back to an earlier moment, as a server does that lost its last
writes.
"""

from __future__ import annotations

from typing import Any

import redis

from tests.buffer.keyspace import run_keys

Moment = dict[str, tuple[bytes, int]]


def remember(client: redis.Redis, run: str) -> Moment:
    """Every key of a run, with the ms it still has to live (0: for ever)."""
    keys = run_keys(client, run)
    pipe: Any = client.pipeline(transaction=not isinstance(client, redis.RedisCluster))
    for key in keys:
        pipe.dump(key)
        pipe.pttl(key)
    replies = pipe.execute()
    pairs = zip(keys, replies[::2], replies[1::2], strict=True)
    return {key: (value, max(0, ttl)) for key, value, ttl in pairs if value is not None}


def put_back(client: redis.Redis, run: str, moment: Moment) -> None:
    """The run is as it was at `moment` (empty: it never was)."""
    pipe: Any = client.pipeline(transaction=not isinstance(client, redis.RedisCluster))
    for key in run_keys(client, run):
        pipe.delete(key)
    for key, (value, ttl) in moment.items():
        pipe.restore(key, ttl, value)
    pipe.execute()
