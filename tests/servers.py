"""Servers for tests: the embedded Valkey, a cluster of three such, Redis where it is installed, and
one in memory.

In CI (`CI` is set) both are demanded: a missing server fails there instead of being skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.redis.server.embedded import EmbeddedServer, valkey_binary
from buffer.redis.server.in_memory import open_memory
from tests.cluster import start_cluster

KINDS = ("valkey", "redis")
STORES = (*KINDS, "cluster", "memory")
SAFE = ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction",
        "--save", "")  # fmt: skip
REPLY_S = 400.0
"""How long a client of a test waits for a reply: redis-py would wait 5 s, and machines are shared."""
_numbers = count(1)
_given: list[Any] = []
"""Clients that `close_clients` closes."""


def raw_client(url: str, **options: Any) -> redis.Redis:
    """A client of redis-py for one server, without the retries of a store."""
    return redis.Redis.from_url(url, socket_timeout=REPLY_S, **options)


@contextmanager
def raw_cluster(url: str) -> Iterator[Any]:
    """The same for a cluster. Its own `close` leaves connections open."""
    client: Any = redis.RedisCluster.from_url(url, socket_timeout=REPLY_S)
    try:
        yield client
    finally:
        client.disconnect_connection_pools()


@dataclass(frozen=True)
class Server:
    """A running server that a test may fill, but not stop or change."""

    kind: str
    url: str

    @cached_property
    def client(self) -> Any:
        """A plain client (bytes, no retries of ours) that all tests share."""
        return self._connect()

    def connect(self) -> Any:
        """A client that its test need not close."""
        _given.append(client := self._connect())
        return client

    def _connect(self) -> Any:
        if self.kind == "cluster":
            return redis.RedisCluster.from_url(self.url, socket_timeout=REPLY_S)
        if self.kind == "memory":
            return open_memory(self.url, "tests")
        return raw_client(self.url)


def close_clients() -> None:
    """Close those that were given to the last test: the garbage collector would blame a later one
    for connections in a cycle of references, as those of rq are.
    """
    while _given:
        client = _given.pop()
        getattr(client, "disconnect_connection_pools", client.close)()


class OwnServer:
    """A Redis or Valkey on a socket in `folder`, which a test may kill and start again."""

    def __init__(self, kind: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.url = f"unix://{folder / 's'}"
        self._binary = str(valkey_binary()) if kind == "valkey" else find_redis()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start it with these options, and wait until it answers, if only with a refusal."""
        fixed = ["--port", "0", "--unixsocket", str(self.folder / "s"), "--dir", str(self.folder)]
        words = [self._binary, *fixed, "--logfile", "log", *options]
        self._process = subprocess.Popen(words, cwd=self.folder, start_new_session=True)
        for _ in range(30_000):
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text(encoding="utf-8"))
            with suppress(redis.ConnectionError, redis.ResponseError), raw_client(self.url) as raw:
                try:
                    raw.ping()
                except redis.AuthenticationError:
                    return
                return
            time.sleep(0.01)
        raise RuntimeError(f"no answer at {self.url}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextmanager
def start_redis(folder: Path, *options: str) -> Iterator[str]:
    """A Redis of its own in `folder`, with further options; the URL of its socket. Stopped at the
    end.
    """
    server = OwnServer("redis", folder)
    try:
        server.start(*options)
        yield server.url
    finally:
        server.kill()


def find_redis() -> str:
    if binary := shutil.which("redis-server"):
        return binary
    if os.environ.get("CI"):
        pytest.fail("no redis-server on this machine, and CI must test both servers")
    pytest.skip("no redis-server on this machine")


@contextmanager
def start_server(kind: str, folder: Path) -> Iterator[Server]:
    """A server that is safe for a run: persistent, never evicting."""
    if kind == "valkey":
        with EmbeddedServer(folder) as embedded:
            yield Server(kind, embedded.url)
    elif kind == "cluster":
        with start_cluster(str(valkey_binary()), folder, *SAFE) as cluster:
            yield Server(kind, cluster.url)
    elif kind == "memory":
        yield Server(kind, f"memory://{folder.name}")
    else:
        with start_redis(folder, *SAFE) as url:
            yield Server(kind, url)


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    with ExitStack() as stack:
        yield cache(
            lambda kind: stack.enter_context(start_server(kind, tmp_path_factory.mktemp(kind)))
        )


def _server(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Server:
    """The session's server of this kind, empty; tests keep apart by `run_name`.

    Not started here: pytest forgets a parameter's fixture at the next parameter, and comes back to
    it in each file.
    """
    chosen = server_of(request.param)
    chosen.client.flushall()
    return chosen


server = pytest.fixture(scope="session", params=KINDS, name="server")(_server)
store_server = pytest.fixture(scope="session", params=STORES, name="server")(_server)
"""For the tests of the contract itself."""

on_both = pytest.mark.parametrize("server", KINDS, indirect=True)
"""For the tests of folders whose `server` is Valkey where nothing else is said."""


@pytest.fixture
def redis_client(server: Server) -> Any:
    return server.client


@pytest.fixture
def run_name() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"
