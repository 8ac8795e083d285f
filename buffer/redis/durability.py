"""What is waited for behind writes: the server's disk, and replicas (I6).

WAIT and WAITAOF count the writes of their own connection. A repeated call may have made none, and
the one that it repeats may have used another connection, so they always follow a write of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import TimeoutError

from buffer.redis.connection.bulk_io import Command
from buffer.redis.keys import clock_beside, sync_beside

WAIT_MS = 5_000
"""The longest wait for disk and replicas in one attempt; well below the socket's time-out."""


class NotDurable(TimeoutError):
    """A write is done, but not yet where it must be before it is answered."""


class Durability(NamedTuple):
    """Where a write must be before it is answered."""

    replicas: int
    disk: bool

    @property
    def must_wait(self) -> bool:
        """Return whether a durable call has to wait behind its answer."""
        return self.disk or self.replicas > 0

    def behind_script(self, sync: str, key: str) -> list[Command]:
        """Return commands to follow a script on keys of a run; `sync` is the hash of sync.lua."""
        # WAIT and not WAITAOF for replicas: they report their disks only once a second (measured:
        # 0.5 s a call)
        disk = [("WAITAOF", 1, 0, WAIT_MS)] if self.disk else []
        return [("EVALSHA", sync, 1, clock_beside(key)), ("WAIT", self.replicas, WAIT_MS), *disk]

    def behind_payloads(self, key: str) -> list[Command]:
        """Return commands to follow writes of payloads on one node of a cluster.

        The replicas for which a script waits are those of another node.
        """
        return [("SET", sync_beside(key), 1, "PX", 1), ("WAIT", self.replicas, WAIT_MS)]

    def check(self, answers: Sequence[Any]) -> None:
        """Raise NotDurable if the answers to these commands show that something is missing."""
        _, replicas, *disks = answers
        if [on_disk for on_disk, _ in disks] == [0]:
            raise NotDurable(f"not on the server's disk after {WAIT_MS} ms")
        if replicas < self.replicas:
            raise NotDurable(
                f"only {replicas} of {self.replicas} replicas have it after {WAIT_MS} ms"
            )
