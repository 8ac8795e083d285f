"""What is waited for behind writes: the server's disk, and replicas (I6).

WAIT and WAITAOF speak of the writes of their own connection. A repeated call may have made none,
and the ones that it repeats may be of another connection, so a write of our own always stands
before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import TimeoutError

from buffer.store.bulk_io import Command
from buffer.store.keys import clock_beside, sync_beside

WAIT_MS = 5_000
"""How long disk and replicas are waited for at a time; well below the socket's own time-out."""


class Durability(NamedTuple):
    """Where a write must be before it is answered."""

    replicas: int
    disk: bool

    @property
    def must_wait(self) -> bool:
        """Whether the answer to a durable call says nothing yet."""
        return self.disk or self.replicas > 0

    def behind_script(self, sync: str, key: str) -> list[Command]:
        """Return commands to follow a script on the keys of a run; `sync` is the hash of that one."""
        # WAIT and not WAITAOF for replicas: they report their disks only once a second (measured:
        # 0.5 s a call)
        disk = [("WAITAOF", 1, 0, WAIT_MS)] if self.disk else []
        return [("EVALSHA", sync, 1, clock_beside(key)), ("WAIT", self.replicas, WAIT_MS), *disk]

    def behind_payloads(self, key: str) -> list[Command]:
        """Commands to follow writes of payloads on the node of one of them, in a cluster: the
        replicas that a script waits for are those of another node.
        """
        return [("SET", sync_beside(key), 1, "PX", 1), ("WAIT", self.replicas, WAIT_MS)]

    def check(self, answers: Sequence[Any]) -> None:
        """Raise TimeoutError where the answers to these commands say that something is missing."""
        _, replicas, *disks = answers
        if [on_disk for on_disk, _ in disks] == [0]:
            raise TimeoutError(f"not on the server's disk after {WAIT_MS} ms")
        if replicas < self.replicas:
            raise TimeoutError(
                f"only {replicas} of {self.replicas} replicas have it after {WAIT_MS} ms"
            )
