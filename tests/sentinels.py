"""A primary, its replicas, and a Sentinel that names another primary once a test says so.

A claim waits for no replica. A Sentinel that took a slow primary of a busy machine for dead would
lose it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.cluster import Node, free_ports
from tests.waits import until

SERVICE = "queue"


class Watched:
    """Two replicas: one is left when the other has become the primary."""

    down_after_ms = 60_000
    failover_timeout_ms = 60_000

    def __init__(self, binary: str, folder: Path, *options: str) -> None:
        *ports, watching = free_ports(4)
        self.primary, *self.replicas = (
            self._make(binary, folder / str(port), port, options) for port in ports
        )
        self.sentinel = Node(binary, folder, watching, ())
        self._binary = binary
        self._folder = folder
        self._sentinel: subprocess.Popen[bytes] | None = None

    def _make(self, binary: str, folder: Path, port: int, options: tuple[str, ...]) -> Node:
        return Node(binary, folder, port, options)

    @property
    def url(self) -> str:
        (nobody,) = free_ports(1)
        return f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def start(self) -> None:
        for node in (self.primary, *self.replicas):
            node.start()
        for replica in self.replicas:
            replica.ask("REPLICAOF", "127.0.0.1", self.primary.known_port)
        until(lambda: all(self._follows(replica) for replica in self.replicas), "the replicas")
        self._watch()

    def _follows(self, replica: Node) -> bool:
        return bool(replica.ask("INFO", "replication").get("master_link_status") == "up")

    def _watch(self) -> None:
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"port {self.sentinel.port}\nbind 127.0.0.1\ndir {self._folder}\nlogfile sentinel.log\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.known_port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {self.down_after_ms}\n"
            f"sentinel failover-timeout {SERVICE} {self.failover_timeout_ms}\n",
            encoding="utf-8",
        )
        self._sentinel = subprocess.Popen(
            [self._binary, str(config), "--sentinel"], start_new_session=True
        )
        until(
            lambda: (
                self.sentinel.answers()
                and len(self.sentinel.ask("SENTINEL REPLICAS", SERVICE)) == 2
            ),
            "the Sentinel",
        )

    def promote(self) -> None:
        until(self._starts_failover, "a replica that may replace the primary")

    def _starts_failover(self) -> bool:
        try:
            self.sentinel.ask("SENTINEL FAILOVER", SERVICE)
        except redis.ResponseError as error:
            if "NOGOODSLAVE" not in str(error):
                raise
            return False
        return True

    def connections(self) -> int:
        return len(self.sentinel.ask("CLIENT LIST")) - 1

    def close(self) -> None:
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
        for node in (self.primary, *self.replicas):
            node.kill()


@contextmanager
def start_watched(binary: str, folder: Path, *options: str) -> Iterator[Watched]:
    """All of it; killed at the end."""
    watched = Watched(binary, folder, *options)
    try:
        watched.start()
        yield watched
    finally:
        watched.close()
