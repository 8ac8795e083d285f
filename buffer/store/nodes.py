"""Which server holds a key: the only one there is, or a node of a cluster.

A server says itself whether it is a cluster. There, every key is asked for at its own node with a
plain client, so that scripts, WATCH, blocking calls, WAITAOF and pub/sub are what they are on one
server. redis-py's cluster client is not used: its pipelines send commands again whose connection
broke, whatever its retry policy says (I13). A slot that moved, or moves, is an error that passes:
`Store` waits, and the map is read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ConnectionError, NoPermissionError, TimeoutError

from buffer.store.retry import SYSTEM_RANDOM
from buffer.store.url import SOCKET_TIMEOUT_S, at_node, open_client, seeds

T = TypeVar("T")

Role = Literal["control", "bulk", "bells"]
"""Each has connections of its own, so that a large payload never delays a heartbeat."""


class Servers:
    """The servers behind one URL. Thread-safe; connects lazily."""

    def __init__(self, url: str, name: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._seeds = seeds(url)
        self._nodes = list(self._seeds)
        self._clients: dict[tuple[Role, str], redis.Redis] = {}
        self._lock = threading.RLock()
        self._slots: list[str] | None = None
        for seed in self._seeds:  # a bad URL is told at once
            self._client("control", seed)

    def client(self, role: Role, key: str = "") -> Any:
        """The client of the server that holds `key` (the first of the URL without one). Raises
        redis.RedisError.
        """
        # redis-py types its replies as unions of all protocols: they are told apart where they are
        # read
        return self._client(role, self.url_of(key) if key else self._seeds[0])

    def url_of(self, key: str) -> str:
        """The URL of the server that holds `key`. Raises redis.RedisError."""
        slots = self._map()
        url = slots[key_slot(key.encode())] if slots else self._seeds[0]
        if not url:
            raise ConnectionError(f"no node of the cluster serves the slot of {key}")
        return url

    @property
    def is_cluster(self) -> bool:
        """Asks the server, once. Raises redis.RedisError."""
        return bool(self._map())

    def at_each(
        self, role: Role, keys: Sequence[str], run: Callable[[Any, list[int]], list[T]]
    ) -> list[T]:
        """What `run` answers for the places of the keys that one server holds, for each server; in
        order.
        """
        places: dict[Any, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self.client(role, key), []).append(place)
        answers: dict[int, T] = {}
        for client, here in places.items():
            answers |= zip(here, run(client, here), strict=True)
        return [answers[place] for place in range(len(keys))]

    def masters(self) -> list[tuple[str, Any]]:
        """(URL, client) of every server that holds keys. Raises redis.RedisError."""
        urls = sorted(set(self._map()) - {""}) or self._seeds[:1]
        return [(url, self._client("control", url)) for url in urls]

    def forget_slots(self) -> None:
        """Something may have moved: ask where the slots are before the next use."""
        with self._lock:
            if self._slots:
                self._slots = None

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _client(self, role: Role, url: str) -> redis.Redis:
        with self._lock:
            if (role, url) not in self._clients:
                name = self._name if role == "control" else f"{self._name}-{role}"
                self._clients[role, url] = open_client(url, name=name, timeout_s=self._timeout_s)
            return self._clients[role, url]

    def _map(self) -> list[str]:
        """The URL of each slot's master, "" where a slot has none; empty where there is no cluster."""
        with self._lock:
            if self._slots is None:
                self._slots = self._ask()
            return self._slots

    def _ask(self) -> list[str]:
        # all nodes that were ever seen, in any order: one that is cut off must not be believed for
        # ever
        urls = SYSTEM_RANDOM.sample(self._nodes, len(self._nodes))
        for url in urls[:-1]:
            try:
                return self._slots_seen_by(url)
            except (ConnectionError, TimeoutError):
                continue
        return self._slots_seen_by(urls[-1])

    def _slots_seen_by(self, url: str) -> list[str]:
        client: Any = self._client("control", url)
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
        return False  # a socket, or whom Sentinels watch
    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except NoPermissionError:
        return False


def _text(host: bytes | str | None) -> str:
    return host.decode() if isinstance(host, bytes) else host or ""
