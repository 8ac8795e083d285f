"""Servers of a chaos run of which one may be lost: behind a Sentinel, or in a cluster.

Servers reach each other through the relays of a `Backbone`, clients through links of their own. So
a primary can be cut off from the other servers, together with some of the clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import redis

from buffer.redis.keys import Keys
from buffer.redis.server.embedded import EmbeddedServer, valkey_binary
from proofs.chaos.backbone import Backbone
from proofs.chaos.plan import RUN
from proofs.chaos.way import Way
from tests.cluster import MASTERS, Cluster, Node, free_ports
from tests.sentinels import SERVICE, Watched
from tests.servers import SAFE

DOWN_AFTER_MS = 1500
"""Of silence, until a primary is replaced: not where a machine is merely busy."""

ANSWER_S = 1.0
"""A primary that was stopped answers nobody, and the harness has more to do."""

SENTINEL = "sentinel"
JUDGING = "judging"


def source_of(node: Node) -> str:
    """The address that a server's own connections come from."""
    return node.options[node.options.index("--bind-source-addr") + 1]


class Replicated(ABC):
    """What faults need to know of such servers."""

    can_step = False

    def __init__(self) -> None:
        self.backbone = Backbone()
        self._numbers = count(1)

    def new_source(self) -> str:
        """An address of this machine, for the connections of one server."""
        return f"127.0.1.{next(self._numbers)}"

    def announce(self, source: str, port: int) -> int:
        """Open a relay to a port of a server; the port to name instead."""
        (announced,) = free_ports(1)
        self.backbone.relay(source, announced, port)
        return announced

    @property
    @abstractmethod
    def nodes(self) -> list[Node]:
        """Servers that hold the run, or may come to hold it."""

    @abstractmethod
    def start(self) -> None:
        """Start all, and return once they follow each other."""

    @abstractmethod
    def kill(self) -> None:
        """End all."""

    @property
    @abstractmethod
    def ways(self) -> list[Way]:
        """How clients reach them."""

    @abstractmethod
    def url_by(self, ports: Mapping[str, int]) -> str:
        """The URL of the run, by the ports of a link."""

    def judge_url_by(self, ports: Mapping[str, int]) -> str:
        """The URL of the judges' queue."""
        return self.url_by(ports)

    @abstractmethod
    def primary(self, *, without: Node | None = None) -> Node | None:
        """Who holds the run, as all agree who can be asked; `without` one that cannot."""

    @abstractmethod
    def is_whole(self) -> bool:
        """Whether all are up, and agree, and every replica follows."""

    def connect(self) -> redis.Redis:
        """A plain client of the server that holds the run. Raises redis.ConnectionError."""
        node = self.primary()
        if node is None:
            raise redis.ConnectionError("no server holds the run")
        return node.connect(ANSWER_S)

    def config_set(self, name: str, value: str) -> None:
        """Change a setting of every server."""
        for node in self.nodes:
            node.ask("CONFIG SET", name, value)


def _follows(node: Node, primary: Node) -> bool:
    found = node.ask("INFO", "replication")
    return bool(
        found["role"] == "slave"
        and found["master_link_status"] == "up"
        and found["master_port"] == primary.known_port
    )


class WatchedServers(Replicated):
    """A primary and two replicas, watched by a Sentinel."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._watched = _Watched(self, folder)

    @property
    def nodes(self) -> list[Node]:
        return [self._watched.primary, *self._watched.replicas]

    def start(self) -> None:
        self._watched.start()

    def kill(self) -> None:
        self._watched.close()
        self.backbone.close()

    @property
    def ways(self) -> list[Way]:
        watching = Way(SENTINEL, port=self._watched.sentinel.port)
        return [watching, *(Way(str(n.port), "", n.port, n.known_port) for n in self.nodes)]

    def url_by(self, ports: Mapping[str, int]) -> str:
        return f"redis+sentinel://127.0.0.1:{ports[SENTINEL]}/{SERVICE}"

    def primary(self, *, without: Node | None = None) -> Node | None:
        _, port = self._watched.sentinel.ask("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(node for node in self.nodes if node.known_port == int(port))

    def is_whole(self) -> bool:
        primary = self.primary()
        return (
            primary is not None
            and all(node.answers() for node in self.nodes)
            and all(_follows(node, primary) for node in self.nodes if node is not primary)
        )


class _Watched(Watched):
    down_after_ms = DOWN_AFTER_MS
    failover_timeout_ms = 5000

    def __init__(self, servers: WatchedServers, folder: Path) -> None:
        self._servers = servers
        super().__init__(str(valkey_binary()), folder, *SAFE)

    def _make(self, binary: str, folder: Path, port: int, options: tuple[str, ...]) -> Node:
        source = self._servers.new_source()
        announced = self._servers.announce(source, port)
        more = ("--bind-source-addr", source, "--replica-announce-port", str(announced))
        return Node(binary, folder, port, (*options, *more), announced=announced)


class ClusterServers(Replicated):
    """Three masters, and a replica of each. rq has a server of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._cluster = _Cluster(self, folder)
        self._judging = EmbeddedServer(folder / JUDGING)

    @property
    def nodes(self) -> list[Node]:
        return self._cluster.nodes

    def start(self) -> None:
        self._cluster.start()
        for master in self._cluster.nodes[:MASTERS]:
            self._cluster.add_replica(master)
        self._judging.start()

    def kill(self) -> None:
        self._cluster.close()
        self._judging.kill()
        self.backbone.close()

    @property
    def ways(self) -> list[Way]:
        judging = Way(JUDGING, str(self._judging.socket_path))
        return [judging, *(Way(str(n.port), "", n.port, n.known_port) for n in self.nodes)]

    def url_by(self, ports: Mapping[str, int]) -> str:
        nodes = ",".join(f"127.0.0.1:{ports[str(node.port)]}" for node in self.nodes)
        return f"redis://{nodes}/0"

    def judge_url_by(self, ports: Mapping[str, int]) -> str:
        return f"redis://127.0.0.1:{ports[JUDGING]}/0"

    def primary(self, *, without: Node | None = None) -> Node | None:
        asked = [node for node in self.nodes if node is not without and node.process]
        found = self._cluster.ports_of(Keys(RUN).meta, asked)
        port = found.pop() if len(found) == 1 else 0
        return next((node for node in self.nodes if node.known_port == port), None)

    def is_whole(self) -> bool:
        if not all(node.answers() for node in self.nodes) or self.primary() is None:
            return False
        found = [node.ask("INFO", "replication") for node in self.nodes]
        replicas = [facts for facts in found if facts["role"] == "slave"]
        return (
            len(replicas) == MASTERS
            and all(facts["master_link_status"] == "up" for facts in replicas)
            and self._cluster.is_whole()
        )


class _Cluster(Cluster):
    def __init__(self, servers: ClusterServers, folder: Path) -> None:
        self._servers = servers
        super().__init__(str(valkey_binary()), folder, *SAFE, timeout_ms=DOWN_AFTER_MS)

    def _make(self, binary: str, folder: Path, port: int, bus: int) -> Node:
        node = super()._make(binary, folder, port, bus)
        source = self._servers.new_source()
        node.announced = self._servers.announce(source, port)
        node.bus = self._servers.announce(source, bus)
        node.options += ("--bind-source-addr", source, "--cluster-announce-ip", "127.0.0.1")
        node.options += ("--cluster-announce-port", str(node.announced))
        node.options += ("--cluster-announce-bus-port", str(node.bus))
        return node
