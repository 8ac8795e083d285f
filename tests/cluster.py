"""A real cluster on free ports of this machine: made by hand, without redis-cli, in about a second."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry

from tests.waits import until

MASTERS = 3
_PORTS = random.Random(os.getpid())
PATIENCE_MS = 10_000
"""A node that is silent for so long is taken for dead: never, on a machine that is merely busy."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all of them different.

    Below those that the system gives to outgoing connections: one of them would be taken again
    before it is used.
    """
    held: list[socket.socket] = []
    while len(held) < count:
        try:
            held.append(socket.create_server(("127.0.0.1", _PORTS.randrange(12_000, 32_000))))
        except OSError:
            continue
    ports = [int(server.getsockname()[1]) for server in held]
    for server in held:
        server.close()
    return ports


def adjacent_ports() -> int:
    """Return the first of two neighbours that nobody listens on."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1)):
                return port


@dataclass
class Node:
    """A server that a test may kill and start again: it keeps its data, its port and its name."""

    binary: str
    folder: Path
    port: int
    options: tuple[str, ...]
    announced: int = 0
    """the port by which other servers reach it, if it is not its own"""
    bus: int = 0
    """the same for the cluster's own messages"""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def known_port(self) -> int:
        """The port that servers name for it."""
        return self.announced or self.port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        fixed = f"--port {self.port} --bind 127.0.0.1 --logfile log --repl-diskless-sync-delay 0"
        words = [self.binary, *fixed.split(), "--dir", str(self.folder), *self.options]
        self.process = subprocess.Popen(words, start_new_session=True)
        until(self.answers, f"an answer of {self.folder}")

    def answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def ask(self, *command: str | int) -> Any:
        with self.connect() as client:
            return client.execute_command(*command)

    def connect(self, timeout_s: float = 5.0) -> redis.Redis:
        """A plain client that never retries."""
        return redis.Redis(port=self.port, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class Cluster:
    """Nodes that know each other. The first three are masters with a third of the slots each.

    After `timeout_ms` of silence a replica takes the place of its master.
    """

    def __init__(
        self, binary: str, folder: Path, *options: str, timeout_ms: int = PATIENCE_MS
    ) -> None:
        self._binary = binary
        self._folder = folder
        self._options = options
        self._timeout_ms = timeout_ms
        self.nodes: list[Node] = []

    @property
    def url(self) -> str:
        """Of any node: the cluster tells the rest."""
        return self.nodes[0].url

    def start(self) -> None:
        bounds = [REDIS_CLUSTER_HASH_SLOTS * i // MASTERS for i in range(MASTERS + 1)]
        for i in range(MASTERS):
            node = self._add()
            node.ask("CLUSTER SET-CONFIG-EPOCH", i + 1)
            node.ask("CLUSTER ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
        self._meet()

    def _add(self) -> Node:
        port, bus = free_ports(2)
        node = self._make(self._binary, self._folder / str(len(self.nodes)), port, bus)
        self.nodes.append(node)
        node.start()
        return node

    def _make(self, binary: str, folder: Path, port: int, bus: int) -> Node:
        options = (
            *("--cluster-enabled", "yes", "--cluster-port", str(bus)),
            *("--cluster-node-timeout", str(self._timeout_ms)),
            *("--cluster-replica-validity-factor", "0"),
        )
        return Node(binary, folder, port, (*options, *self._options), bus=bus)

    def _meet(self) -> None:
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER MEET", "127.0.0.1", node.known_port, node.bus)
        until(self.is_whole, "the cluster to be whole")

    def is_whole(self) -> bool:
        facts = [node.ask("CLUSTER INFO") for node in self.nodes]
        return all(
            f["cluster_state"] == "ok" and int(f["cluster_known_nodes"]) == len(self.nodes)
            for f in facts
        )

    def add_replica(self, master: Node) -> Node:
        """One more node, which holds what `master` holds."""
        node = self._add()
        self._meet()
        node.ask("CLUSTER REPLICATE", self.id_of(master))
        until(
            lambda: node.ask("INFO", "replication").get("master_link_status") == "up", "the replica"
        )
        return node

    def id_of(self, node: Node) -> str:
        return str(node.ask("CLUSTER MYID").decode())

    def ports_of(self, key: str, seen_by: Sequence[Node] = ()) -> set[int]:
        """Who serves a key, as the live nodes see it, or some of them: one, if they agree."""
        slot = key_slot(key.encode())
        return {
            port
            for node in seen_by or self.nodes
            if node.process is not None
            for first, last, (_, port, *_), *_ in node.ask("CLUSTER SLOTS")
            if first <= slot <= last
        }

    def master_of(self, key: str) -> Node:
        (port,) = self.ports_of(key)
        return next(node for node in self.nodes if node.known_port == port)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


@contextmanager
def start_cluster(binary: str, folder: Path, *options: str) -> Iterator[Cluster]:
    """A cluster of three masters; killed at the end."""
    cluster = Cluster(binary, folder, *options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
