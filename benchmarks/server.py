"""The servers that a benchmark starts for itself, on Unix sockets, and stops at its end.

Both are the embedded Valkey. *durable* is the server as a run gets it: every answered write is on
disk. *in memory* keeps nothing: there, no disk hides what the client costs. An installed
redis-server is only measured for its memory: between two servers, figures cannot be compared.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from buffer.redis.server.embedded import EmbeddedServer, valkey_binary
from buffer.redis.store import Store

_KEEP_NOTHING = ("--appendonly", "no", "--save", "", "--maxmemory-policy", "noeviction")


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A running server: `store` is ours, `raw` a plain client with the same settings as ours."""

    name: str
    version: str
    store: Store
    raw: Any

    @property
    def process(self) -> int:
        """Return the server's process id."""
        return int(self.raw.info("server")["process_id"])

    def processor_time(self) -> float:
        """Return the seconds of processor that this process and the server have used."""
        return time.process_time() + used_by(self.process)

    def clear(self) -> None:
        """Remove everything, so that the next round starts from the same state."""
        self.raw.flushall()


def used_by(process: int) -> float:
    """Return the seconds of processor that the threads of another process have used."""
    # in nanoseconds; /proc/PID/stat counts hundredths of a second
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def durable_server(port: int | None = None) -> Iterator[BenchServer]:
    """Start the embedded Valkey with `appendfsync always`. `port`: of TCP; None: a Unix socket."""
    with (
        tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder,
        EmbeddedServer(Path(folder), port=port) as server,
    ):
        yield connect("durable", server.url)


@contextmanager
def memory_server(binary: str = "") -> Iterator[BenchServer]:
    """Start the embedded Valkey's binary, or another one, without persistence."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        socket = Path(folder, "redis.sock")
        where = (
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--dir",
            folder,
            "--logfile",
            "redis.log",
        )
        process = subprocess.Popen(
            [binary or str(valkey_binary()), *where, *_KEEP_NOTHING], start_new_session=True
        )
        try:
            _wait_for(f"unix://{socket}")
            yield connect("in memory", f"unix://{socket}")
        finally:
            process.kill()
            process.wait()


def connect(name: str, url: str) -> BenchServer:
    store = Store(url, name="bench")
    info = store.client.info("server")
    version = (
        f"Valkey {info['valkey_version']}"
        if "valkey_version" in info
        else f"Redis {info['redis_version']}"
    )
    return BenchServer(name, version, store, store.client)


def _wait_for(url: str) -> None:
    for _ in range(500):
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
        except redis.ConnectionError:
            time.sleep(0.01)
        else:
            return
    raise RuntimeError(f"no server at {url}")
