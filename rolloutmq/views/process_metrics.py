"""Metrics of one process: its calls to the server by name and time, memory, processor time.

`--metrics HOST:PORT` of worker, producer and train serves them. Metrics of the whole run are
served by `rolloutmq metrics`.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector

from buffer.errors import ConfigError
from buffer.redis.store import Store
from rolloutmq.views.http_endpoint import MetricsEndpoint

TOKEN = "ROLLOUTMQ_METRICS_TOKEN"
"""The environment variable with the token that readers on other machines must send."""

_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)
_WAITS = frozenset({"bell"})
"""Calls that block until something happens: their time is not the server's."""


def serve_process(process: str, store: Store, address: str) -> MetricsEndpoint:
    """Serve /metrics at `HOST:PORT` until the process ends. Raises ConfigError."""
    host, port = parse_address(address)
    registry = process_registry(process, store)
    return MetricsEndpoint(registry, host=host, port=port, token=os.environ.get(TOKEN, ""))


def process_registry(process: str, store: Store) -> CollectorRegistry:
    """Return the metrics of this process, which from now on count the calls of the store."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    about = Info("rolloutmq_process", "Which process this is.", registry=registry)
    about.info({"process": process})
    _watch_calls(store, registry)
    return registry


def _watch_calls(store: Store, registry: CollectorRegistry) -> None:
    seconds = Histogram(
        "rolloutmq_store_call_seconds",
        "Calls to the server, including the time that it was unreachable.",
        ["call"],
        buckets=_BUCKETS,
        registry=registry,
    )
    retries = Counter(
        "rolloutmq_store_retries",
        "Repeated calls, because the server was unreachable.",
        ["call"],
        registry=registry,
    )

    def watch(call: str, took_s: float, attempts: int) -> None:
        if call not in _WAITS:
            seconds.labels(call).observe(took_s)
        if attempts:
            retries.labels(call).inc(attempts)

    store.watchers.append(watch)


def parse_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `HOST:PORT`, `[::1]:PORT`, or `PORT`, which means loopback."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--metrics {address!r} is not an address", hint="write 9466 or 10.0.0.7:9466"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
