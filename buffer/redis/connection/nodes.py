"""Find the server that holds a key: the only one, or a node of a cluster.

In a cluster, a plain client uses each key at its own node, so that scripts, WATCH, blocking calls,
WAITAOF and pub/sub work as on one server. redis-py's cluster client repeats commands of pipelines
whose connection broke, even without a retry policy (I13). A slot that moves causes a transient
error: `Store` waits and reads the slot map again.
"""

from __future__ import annotations

import threading
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ConnectionError, NoPermissionError, RedisError, TimeoutError

from buffer.redis.connection.retry import SYSTEM_RANDOM
from buffer.redis.connection.url import SOCKET_TIMEOUT_S, at_node, open_client, seeds


class Servers:
    """Finds the client of the server that holds a key. Thread-safe; connects lazily.

    Each call has a connection of its own, so that a large payload never delays a heartbeat.
    """

    def __init__(self, url: str, name: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._seeds = seeds(url)
        self._nodes = list(self._seeds)
        self._clients: dict[str, redis.Redis] = {}
        self._lock = threading.RLock()
        self._slots: list[str] | None = None
        self._allocator: str | None = None
        for seed in self._seeds:  # raises ConfigError for a bad URL
            self._client(seed)

    def client(self, key: str = "") -> Any:
        """Return the client of the server with `key`, or of the first. Raises redis.RedisError."""
        # Any: redis-py types its replies as unions over all protocols, which only their readers
        # can narrow
        return self._client(self.url_of(key) if key else self._seeds[0])

    def url_of(self, key: str) -> str:
        """Return the URL of the server that holds `key`. Raises redis.RedisError."""
        slots = self._map()
        url = slots[key_slot(key.encode())] if slots else self._seeds[0]
        if not url:
            raise ConnectionError(f"no node of the cluster serves the slot of {key}")
        return url

    @property
    def is_cluster(self) -> bool:
        """Return whether the server is a cluster; it is asked once. Raises redis.RedisError."""
        return bool(self._map())

    @property
    def has_size_classes(self) -> bool:
        """Return whether the server's allocator is jemalloc, as far as it tells.

        It is asked once. A server that hides its allocator, or refuses INFO, counts as one with
        jemalloc, with which Redis and Valkey are built on Linux. After a move to a server with
        another allocator, values are cut for the old one until this process ends: readers accept
        any cut.
        """
        if self._allocator is None:
            try:
                found = self.client().info("memory")
            except (ConnectionError, TimeoutError):
                return True  # a server that does not answer is asked again
            except RedisError:
                found = {}
            self._allocator = str(found.get("mem_allocator", "jemalloc"))
        return self._allocator.startswith("jemalloc")

    def masters(self) -> list[tuple[str, Any]]:
        """Return (URL, client) of every server that holds keys. Raises redis.RedisError."""
        urls = sorted(set(self._map()) - {""}) or self._seeds[:1]
        return [(url, self._client(url)) for url in urls]

    def forget_slots(self) -> None:
        with self._lock:
            if self._slots:
                self._slots = None

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _client(self, url: str) -> redis.Redis:
        with self._lock:
            if url not in self._clients:
                self._clients[url] = open_client(url, name=self._name, timeout_s=self._timeout_s)
            return self._clients[url]

    def _map(self) -> list[str]:
        """Return the URL of each slot's master ("": none); an empty list outside a cluster."""
        with self._lock:
            if self._slots is None:
                self._slots = self._ask()
            return self._slots

    def _ask(self) -> list[str]:
        # all nodes that were ever seen, in random order: a node that is cut off from the others has
        # an old map, and must not be asked every time
        urls = SYSTEM_RANDOM.sample(self._nodes, len(self._nodes))
        for url in urls[:-1]:
            try:
                return self._slots_seen_by(url)
            except (ConnectionError, TimeoutError):
                continue
        return self._slots_seen_by(urls[-1])

    def _slots_seen_by(self, url: str) -> list[str]:
        client: Any = self._client(url)
        if not _is_cluster(client, url):
            return []
        slots = [""] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, *owners in client.execute_command("CLUSTER SLOTS"):
            master, *replicas = [at_node(url, _text(host), port) for host, port, *_ in owners]
            slots[first : last + 1] = [master] * (last - first + 1)
            self._nodes += [node for node in (master, *replicas) if node not in self._nodes]
        return slots


def _is_cluster(client: Any, url: str) -> bool:
    if not url.startswith(("redis:", "rediss:")):
        return False  # a Unix socket, or a primary that Sentinels name
    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except NoPermissionError:
        return False


def _text(host: bytes | str | None) -> str:
    return host.decode() if isinstance(host, bytes) else host or ""
