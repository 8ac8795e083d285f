"""The metrics of all runs of a server, and of one process, for Prometheus."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from buffer.control.control import Mode
from buffer.errors import ConfigError, StoreError
from buffer.redis.server.check import read_memory
from buffer.redis.store import Store
from buffer.run.run import Run
from rolloutmq.http_endpoint import MetricsEndpoint
from rolloutmq.views.number_rows import FAMILIES
from rolloutmq.views.run_view import RunView, read_run_view

WINDOW_S = 300.0  # half-life of an observation's weight
DEADBAND = 0.1  # a smaller difference to the published number is noise, and moves no GPUs
MOST_AT_ONCE = 4.0  # most times by which one observation may enlarge a fleet


@dataclass(frozen=True, slots=True)
class Observation:
    """`waited_s`: how long the trainer has waited in all; `busy`: busy workers at this moment."""

    at_s: float
    trainer: str
    waited_s: float
    busy: float
    live: int


class WorkersWanted:
    """Estimates how many workers would keep the trainer busy; `value` does not flap.

    A trainer that waits for a fraction w of its time could use 1 / (1 - w) times its supply.
    Workers that are busy for a fraction b of their time make it, so `workers * b / (1 - w)` workers
    are wanted. Their number now does not change this estimate, so a fleet scaled by it settles.
    """

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seconds = self._waited_s = self._busy_s = 0.0
        self._last: Observation | None = None
        self.value = 0

    def observe(self, seen: Observation | None) -> int:
        """Count the time since the last observation in its state; None: the run is paused."""
        last = self._last
        self._last = seen
        if seen is not None and not (self.value and seen.live):
            # until more is known, the present fleet is right; an empty one needs a worker
            self.value = max(1, self.value, seen.live)
        elif last and seen and last.trainer == seen.trainer and last.live and seen.at_s > last.at_s:
            seconds = seen.at_s - last.at_s
            waited_s = min(max(seen.waited_s - last.waited_s, 0.0), seconds)
            kept = 0.5 ** (seconds / self._window_s)
            self._seconds = self._seconds * kept + seconds
            self._waited_s = self._waited_s * kept + waited_s
            self._busy_s = self._busy_s * kept + last.busy * seconds
            trained_s = max(
                self._seconds - self._waited_s, self._busy_s / (MOST_AT_ONCE * seen.live)
            )
            wanted = self._busy_s / trained_s if trained_s else float(seen.live)
            if abs(wanted - self.value) > max(DEADBAND * self.value, 0.5):
                self.value = max(1, math.ceil(wanted - DEADBAND))
        return self.value

    def end(self) -> int:
        """End the estimate: the run is over and needs no worker; return 0."""
        self._last = None
        self.value = 0
        return 0


def observation_in(snap: RunView) -> Observation | None:
    """Return the observation in a snapshot; None while the run is paused or has no trainer."""
    if snap.mode != "run" or not snap.trainer.is_alive:
        return None
    live = snap.live_workers
    held = [worker.holds for worker in live]
    room = [worker.concurrency or max(held, default=0) for worker in live]
    busy = sum(min(1.0, has / may) for has, may in zip(held, room, strict=True) if may)
    waited_ms = int(snap.control.get("trainer_waited_ms", 0))
    seen_ms = snap.now_ms - (snap.trainer.silent_ms or 0)
    return Observation(
        seen_ms / 1000, snap.control.get("trainer", ""), waited_ms / 1000, busy, len(live)
    )


class RunCollector(Collector):
    """Collects the metrics of all runs of a server, or of the named one.

    If the server is unreachable, the only metric is `rolloutmq_up 0`.
    """

    def __init__(self, store: Store, name: str | None = None) -> None:
        self._store = store
        self._name = name
        self._wanted: dict[str, WorkersWanted] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Return no names: a registry that asks for them must not read the runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("rolloutmq_up", "1 while the server of the runs answers, else 0.")
        try:
            snaps = self.poll()
            memory = self._store.retrying("memory", lambda: read_memory(self._store.servers))
        except StoreError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        used = GaugeMetricFamily(
            "rolloutmq_server_memory_bytes", "Memory that a server uses.", labels=["server"]
        )
        limit = GaugeMetricFamily(
            "rolloutmq_server_memory_limit_bytes", "Its maxmemory; 0: none.", labels=["server"]
        )
        for server, found in memory.items():
            used.add_metric([server], found.used)
            limit.add_metric([server], found.limit)
        yield from (used, limit)
        yield from (family.metric(snaps) for family in FAMILIES)
        wanted = GaugeMetricFamily(
            "rolloutmq_workers_wanted",
            "Workers that would keep the trainer busy; 0 when the run is over.",
            labels=["run"],
        )
        for run, number in self.workers_wanted().items():
            wanted.add_metric([run], number)
        yield wanted

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def poll(self) -> dict[str, RunView]:
        """Return the snapshots of the runs by name, and improve the estimate of workers wanted."""
        names = [name for name in Run.names(self._store) if self._name in (None, name)]
        snaps = {name: read_run_view(Run.open(self._store, name)) for name in names}
        with self._lock:
            self._wanted = {run: self._wanted.get(run) or WorkersWanted() for run in snaps}
            for run, snap in snaps.items():
                wanted = self._wanted[run]
                if snap.mode == Mode.FINISH:
                    wanted.end()
                else:
                    wanted.observe(observation_in(snap))
        return snaps

    def read_workers_wanted(self) -> dict[str, int]:
        """Read the runs, and return the workers wanted by run: for scalers that read JSON."""
        self.poll()
        return self.workers_wanted()

    def workers_wanted(self) -> dict[str, int]:
        """Return the workers wanted by run, as of the newest reading."""
        return {run: wanted.value for run, wanted in self._wanted.items()}


# the environment variable with the token that readers on other machines must send
TOKEN = "ROLLOUTMQ_METRICS_TOKEN"
_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)


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
        # its time is not the server's: it blocks until something happens
        if call != "bell":
            seconds.labels(call).observe(took_s)
        if attempts:
            retries.labels(call).inc(attempts)

    store.watchers.append(watch)
    return registry


def parse_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `HOST:PORT`, `[::1]:PORT`, or `PORT`, which means loopback."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--metrics {address!r} is not an address", hint="write 9466 or 10.0.0.7:9466"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
