"""A fresh run for each test, on each kind of server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import redis

from buffer.limits import RunLimits
from buffer.redis.store import Store
from buffer.redis.url import Servers
from tests.buffer.scene import LIMITS, Scene
from tests.servers import Server, store_server

__all__ = ["store_server"]

STORES = Path(__file__).parent / "redis"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `without` a kind of store.

    A cluster and memory run the same scripts: `make test` tries them in the room of stores alone.
    """
    for item in items:
        kind = item.callspec.params.get("server") if hasattr(item, "callspec") else None
        for mark in item.iter_markers("without"):
            if kind in mark.args:
                item.add_marker(pytest.mark.skip(reason=f"{kind}: {mark.kwargs['reason']}"))
        if kind in ("cluster", "memory") and STORES not in item.path.parents:
            item.add_marker(pytest.mark.slow)


@cache
def connections(url: str) -> Servers:
    """Those of all tests: to connect, and to ask for slots, takes as long as many a test."""
    return Servers(url, "rolloutmq")


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    store = Store(server.url, deadline_s=5.0)
    if server.kind == "memory":  # costs nothing, and notices late that a test cut a connection
        yield store
        store.close()
        return
    store.servers = connections(server.url)
    yield store


@pytest.fixture
def scene(store: Store, redis_client: redis.Redis, run_name: str) -> Scene:
    return Scene(store, redis_client, run_name)


@pytest.fixture
def make_scene(store: Store, redis_client: redis.Redis, run_name: str) -> Callable[..., Scene]:
    """A scene with other limits: `make_scene(max_tries=1)`."""

    def make(**changes: object) -> Scene:
        return Scene(store, redis_client, run_name, RunLimits(**{**LIMITS.model_dump(), **changes}))

    return make
