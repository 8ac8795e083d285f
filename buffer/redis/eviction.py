"""Notice a server whose `maxmemory-policy` was changed in mid-run, and that now deletes keys.

Missing keys surface late and elsewhere: a trainer whose `control` is gone is fenced. So the policy
and the number of deleted keys are read with heartbeats of roles, with every snapshot, and where a
script refuses its caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from buffer.errors import StoreUnsafe
from buffer.redis.retry import LogOnce

log = logging.getLogger("rolloutmq.store")

LOOK_S = 5.0  # shortest time between two looks of one process

SAFE = "noeviction"


FULL = 0.98
"""The share of maxmemory above which a call that needs room for a payload may be refused."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes that a server uses, and its `maxmemory`; 0: it has no limit."""

    used: int
    limit: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerMemory:
        return cls(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)))

    @property
    def is_full(self) -> bool:
        return bool(self.limit) and self.used >= FULL * self.limit

    def __str__(self) -> str:
        return (
            f"the server is full: {self.used / 2**20:.0f} of {self.limit / 2**20:.0f} MiB "
            "maxmemory are used"
        )


@dataclass(frozen=True, slots=True)
class Eviction:
    """What the servers of a run do when they are full, and how many keys they deleted so far."""

    policy: str = SAFE
    """`maxmemory-policy` of a server that may delete keys, if one does"""
    keys: int = 0  # deleted since the start of each server, of all applications
    full: str = ""  # words about a server that is full

    @classmethod
    def read(cls, clients: Sequence[Any]) -> Eviction:
        """Ask each server. One that refuses to tell (ACL, hosting) counts as safe."""
        found = []
        for client in clients:
            try:
                found.append(client.info("memory", "stats"))
            except redis.ResponseError:  # NOPERM is one
                continue
        policies = [str(info.get("maxmemory_policy", SAFE)) for info in found]
        unsafe = [policy for policy in policies if policy != SAFE]
        evicted = sum(int(info.get("evicted_keys", 0)) for info in found)
        full = [memory for memory in map(ServerMemory.of, found) if memory.is_full]
        return cls((unsafe or [SAFE])[0], evicted, str(full[0]) if full else "")

    @property
    def takes_all(self) -> bool:
        """Return whether keys of a run are deleted; volatile-* takes those with an expiry."""
        return self.policy.startswith("allkeys")

    def __str__(self) -> str:
        what = f"maxmemory-policy is {self.policy}: a full server deletes keys of the run"
        return f"{what}; {self.keys} keys were evicted so far" if self.keys else what

    def error(self) -> StoreUnsafe:
        return StoreUnsafe(
            f"the server evicted keys, and the run is not whole: {self}",
            hint="redis-cli CONFIG SET maxmemory-policy noeviction (and in its config file), raise "
            "maxmemory; then clear the run and make it again from its newest checkpoint (the "
            "regeneration of Run.create)",
            command_hint="redis-cli CONFIG SET maxmemory-policy noeviction (and in its config "
            "file), raise maxmemory; then `rolloutmq run CONFIG --regenerate` continues from the "
            "newest checkpoint",
        )


class EvictionWatch:
    """Looks from time to time whether servers evicted keys since the first look."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._next_s = 0.0
        self._warning = LogOnce(log, "the server is not safe for a run any more")

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_s

    def look(self, found: Eviction, *, is_allowed: bool = False) -> None:
        """Warn of a policy that deletes keys. Raises StoreUnsafe once it did, unless allowed."""
        self._next_s = time.monotonic() + LOOK_S
        # a server that was started again counts from 0
        self._first = found.keys if self._first is None else min(self._first, found.keys)
        if found.takes_all and found.keys > self._first and not is_allowed:
            raise found.error()
        self._warning.report("" if found.policy == SAFE else found.policy, str(found))
