"""What one process tells Prometheus of itself: calls to the server by name and time, memory,
processor time.

`rolloutmq worker|producer|train --metrics HOST:PORT` serves it; what is of the whole run is
`rolloutmq metrics`.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector

from buffer.errors import ConfigError
from buffer.monitoring.http_endpoint import MetricsEndpoint
from buffer.store.store import Store

TOKEN = "ROLLOUTMQ_METRICS_TOKEN"
"""The environment variable that holds the token which readers elsewhere must carry."""

_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)
_WAITS = frozenset({"bell"})
"""Calls that last as long as nothing happens: their time says nothing of the server."""


def serve_process(process: str, store: Store, address: str) -> MetricsEndpoint:
    """Answer /metrics at `HOST:PORT` until the process ends. ConfigError where that cannot be."""
    host, port = parse_address(address)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("rolloutmq_process", "Which process this is.", registry=registry).info(
        {"process": process}
    )
    _watch_calls(store, registry)
    return MetricsEndpoint(registry, host=host, port=port, token=os.environ.get(TOKEN, ""))


def _watch_calls(store: Store, registry: CollectorRegistry) -> None:
    said = "Calls to the server as this process saw them, with what it waited while the server was away."
    seconds = Histogram(
        "rolloutmq_store_call_seconds", said, ["call"], buckets=_BUCKETS, registry=registry
    )
    said = "Times a call was repeated, since the server was away."
    retries = Counter("rolloutmq_store_retries", said, ["call"], registry=registry)

    def watch(call: str, took_s: float, attempts: int) -> None:
        if call not in _WAITS:
            seconds.labels(call).observe(took_s)
        if attempts:
            retries.labels(call).inc(attempts)

    store.watchers.append(watch)


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT`, `[::1]:PORT` or `PORT`, which means loopback."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--metrics {address!r} is no address", hint="for example 9466, or 10.0.0.7:9466"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
