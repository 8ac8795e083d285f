"""What Prometheus is told of a run. This file is the list of all metrics; dashboards and alerts are
tested against it.

One look at a run is a handful of calls without payloads (`take_snapshot`), made when somebody asks.
Names and units are by Prometheus' conventions: seconds, bytes, ratios, `_total` for what only
grows. Everything has the label `run`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from buffer.control.control import Mode
from buffer.control.fleet import WorkerRecord, WorkerState
from buffer.control.histogram import Histogram
from buffer.errors import StoreError
from buffer.monitoring.run_view import Snapshot, TaskView, take_snapshot
from buffer.monitoring.workers_wanted import WorkersWanted, look_at
from buffer.run import Run
from buffer.store.store import Store

Cells = Iterator[tuple[tuple[str, ...], float]]
"""(values of the labels but `run`, number)"""

Times = tuple[tuple[str, ...], Histogram]
"""(values of the labels but `run`, durations)"""

_TASK_COUNTERS = {
    "groups_enqueued": ("enqueued", "Groups that were drawn from the data set and started."),
    "groups_consumed": ("consumed", "Groups that were handed out in batches."),
    "samples_produced": ("produced_samples", "Rollouts in groups that were handed in."),
    "tokens_produced": (
        "produced_tokens",
        "Tokens that were generated, resumed ones counted once.",
    ),
    "tries_failed": ("failed", "Tries that ended in an error or a lost lease."),
    "leases_lost": ("leases_lost", "Leases that ran out or were revoked."),
    "groups_expired": ("expirations", "Times a group became too old."),
    "groups_filtered": ("filtered", "Groups that a filter refused."),
    "groups_dropped": ("dropped", "Groups that an operator ended."),
    "groups_dead": ("dead", "Groups that used up their tries and were not requeued."),
    "groups_regenerated": ("regenerated", "Groups drawn again after the server lost data."),
}
_NOT_CUMULATIVE = {"groups_dead"}

WorkerNumber = Callable[[WorkerRecord], float | None]

_WORKER_GAUGES: dict[str, tuple[str, WorkerNumber]] = {
    "worker_tokens_per_second": ("As the worker measures it.", lambda w: w.tokens_per_s),
    "worker_groups_held": ("Leases that a worker holds.", lambda w: w.holds),
    "worker_groups_judging": (
        "Of these, groups that only wait for their judge.",
        lambda w: w.judging,
    ),
    "worker_engine_requests": ("Running and waiting in its engine.", lambda w: w.requests),
}
_WORKER_COUNTERS: dict[str, tuple[str, WorkerNumber]] = {
    "worker_groups_failed": ("Failed in its hands.", lambda w: w.failed),
    "worker_judge_failures": (
        "Answers of its judges that were failures.",
        lambda w: w.judge_failures,
    ),
}


class RunCollector(Collector):
    """All runs of a server, or the one that is named. A server that is away is told as
    `rolloutmq_up 0`.
    """

    def __init__(self, store: Store, name: str | None = None) -> None:
        self._store = store
        self._name = name
        self._wanted: dict[str, WorkersWanted] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Nothing is looked at when a registry asks for names."""
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("rolloutmq_up", "1 while the server of the runs answers, else 0.")
        try:
            snaps = self.look()
        except StoreError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from _families(snaps)
        wanted: dict[str, Cells] = {
            run: iter([((), number)]) for run, number in self.workers_wanted().items()
        }
        yield _metric(
            "workers_wanted",
            "Workers that would keep the trainer busy; 0 when the run is over.",
            [],
            wanted,
        )

    def registry(self) -> CollectorRegistry:
        """A registry of its own, with this in it."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def look(self) -> dict[str, Snapshot]:
        """One look at each run, by name; what is wanted of its fleet is worked out from this one
        and those before.
        """
        names = [name for name in Run.names(self._store) if self._name in (None, name)]
        snaps = {name: take_snapshot(Run.open(self._store, name)) for name in names}
        with self._lock:
            self._wanted = {run: self._wanted.get(run) or WorkersWanted() for run in snaps}
            for run, snap in snaps.items():
                wanted = self._wanted[run]
                wanted.end() if snap.mode == Mode.FINISH else wanted.observe(look_at(snap))
        return snaps

    def look_for_workers(self) -> dict[str, int]:
        """Workers wanted by run, after one more look: for scalers that read JSON."""
        self.look()
        return self.workers_wanted()

    def workers_wanted(self) -> dict[str, int]:
        """By run, as the newest look has it."""
        return {run: wanted.value for run, wanted in self._wanted.items()}


def _metric(
    name: str, text: str, labels: list[str], cells: dict[str, Cells], *, counter: bool = False
) -> Metric:
    family: Any = (CounterMetricFamily if counter else GaugeMetricFamily)(
        f"rolloutmq_{name}", text, labels=["run", *labels]
    )
    for run, rows in cells.items():
        for values, number in rows:
            family.add_metric([run, *values], number)
    return family  # type: ignore[no-any-return]


def _histogram(
    name: str, text: str, labels: list[str], cells: dict[str, Iterator[Times]]
) -> Metric:
    family: Any = HistogramMetricFamily(f"rolloutmq_{name}", text, labels=["run", *labels])
    for run, rows in cells.items():
        for values, times in rows:
            buckets = [(str(bound_s), count) for bound_s, count in times.at_most().items()]
            buckets.append(("+Inf", times.count))
            family.add_metric([run, *values], buckets, times.total_s)
    return family  # type: ignore[no-any-return]


def _families(snaps: dict[str, Snapshot]) -> Iterator[Metric]:
    def gauge(name: str, text: str, labels: list[str], read: Any) -> Metric:
        return _metric(name, text, labels, {run: read(snap) for run, snap in snaps.items()})

    def counter(name: str, text: str, labels: list[str], read: Any) -> Metric:
        return _metric(
            name, text, labels, {run: read(snap) for run, snap in snaps.items()}, counter=True
        )

    yield gauge(
        "groups",
        "Groups by the place they are in; each is in exactly one.",
        ["task", "place"],
        _places,
    )
    yield gauge("jobs_waiting", "Groups that wait for a worker.", ["task", "lane"], _backlog)
    yield gauge(
        "groups_ready", "Groups that a batch may have.", ["task"], _of_tasks(lambda t: t.ready)
    )
    yield gauge(
        "groups_too_old",
        "Groups that are about to expire.",
        ["task"],
        _of_tasks(lambda t: t.too_old),
    )
    yield gauge(
        "groups_ahead",
        "Groups between the data set and the trainer.",
        ["task"],
        _of_tasks(_started),
    )
    yield gauge(
        "groups_ahead_limit",
        "How many of them there may be.",
        ["task"],
        _of_tasks(lambda t: t.may_start),
    )
    yield gauge(
        "batch_groups", "Groups of a task in a batch.", ["task"], _of_tasks(lambda t: t.asked)
    )
    yield gauge(
        "staleness_groups",
        "Ready groups by staleness in train steps.",
        ["task", "staleness"],
        _staleness,
    )
    yield gauge(
        "reward_mean", "Mean score since the run began, before any filter.", ["task"], _rewards
    )
    yield gauge("task_stopped", "1 where too many tries in a row have failed.", ["task"], _stopped)
    for name, (field, text) in _TASK_COUNTERS.items():
        make = gauge if name in _NOT_CUMULATIVE else counter
        yield make(name, text, ["task"], _of_tasks(lambda t, f=field: t.number(f)))
    yield counter("train_steps", "Train steps: taken, committed, freed.", ["stage"], _steps)
    yield gauge(
        "policy_version", "Train step of the newest weights.", [], _one(lambda s: s.weights.version)
    )
    yield gauge("mode", "1 for the mode of the run.", ["mode"], _mode)
    yield gauge(
        "mode_age_seconds",
        "Since when the mode is what it is.",
        [],
        _one(lambda s: s.paused_ms / 1000),
    )
    yield gauge("role_alive", "1 while the trainer or the producer beats.", ["role"], _roles)
    yield gauge("role_silent_seconds", "Since its last heartbeat.", ["role"], _silences)
    yield counter(
        "trainer_wait_seconds", "What this trainer stood still for groups.", [], _one(_waited)
    )
    yield gauge(
        "workers", "Workers by state; silent ones have missed a lease.", ["state"], _workers
    )
    for name, (text, read) in _WORKER_GAUGES.items():
        yield gauge(name, text, ["worker"], _per_worker(read))
    for name, (text, read) in _WORKER_COUNTERS.items():
        yield counter(name, text, ["worker"], _per_worker(read))
    yield _histogram(
        "judge_seconds",
        "Times of judges' answers, queues included.",
        ["worker"],
        {run: _judge_times(snap) for run, snap in snaps.items()},
    )
    yield _histogram(
        "pause_seconds",
        "Times from a pause of this trainer to the last receipt.",
        [],
        {run: iter([((), snap.pauses)]) for run, snap in snaps.items()},
    )
    yield gauge("leases", "Groups that run.", [], _one(lambda s: s.leases))
    yield gauge(
        "leases_overdue", "Leases that nobody has taken back yet.", [], _one(lambda s: s.overdue)
    )
    yield gauge(
        "dead_letters",
        "Groups that failed for good and wait for an operator.",
        [],
        _one(lambda s: s.dead),
    )
    yield gauge(
        "garbage_payloads",
        "Payloads that nobody needs and nobody has freed.",
        [],
        _one(lambda s: s.garbage),
    )
    yield gauge("payload_bytes", "Bytes of all payloads.", [], _one(lambda s: s.memory.held))
    yield gauge(
        "payload_bytes_limit", "Marks at which new prompts wait; 0: none.", ["mark"], _marks
    )
    yield gauge("account_faults", "Places where the account of groups does not add up.", [],
                _one(lambda s: len(s.faults)))  # fmt: skip


def _one(read: Any) -> Any:
    return lambda snap: iter([((), float(read(snap)))])


def _of_tasks(read: Any) -> Any:
    return lambda snap: (((task.account.task,), float(read(task))) for task in snap.tasks)


def _started(task: TaskView) -> float:
    return task.started


def _places(snap: Snapshot) -> Cells:
    return (
        ((t.account.task, place), n) for t in snap.tasks for place, n in t.account.places.items()
    )


def _backlog(snap: Snapshot) -> Cells:
    return (((t.account.task, lane), n) for t in snap.tasks for lane, n in t.backlog.items())


def _staleness(snap: Snapshot) -> Cells:
    return (((t.account.task, label), n) for t in snap.training for label, n in t.staleness.items())


def _rewards(snap: Snapshot) -> Cells:
    return (((t.account.task,), t.mean_reward) for t in snap.tasks if t.mean_reward is not None)


def _stopped(snap: Snapshot) -> Cells:
    return (((t.account.task,), float(t.is_stopped)) for t in snap.tasks)


def _steps(snap: Snapshot) -> Cells:
    return iter(
        [(("taken",), snap.taken), (("committed",), snap.committed), (("freed",), snap.freed)]
    )


def _mode(snap: Snapshot) -> Cells:
    return (((mode.value,), float(mode.value == snap.mode)) for mode in Mode)


def _roles(snap: Snapshot) -> Cells:
    return iter(
        [
            (("trainer",), float(snap.trainer.is_alive)),
            (("producer",), float(snap.producer.is_alive)),
        ]
    )


def _silences(snap: Snapshot) -> Cells:
    roles = {"trainer": snap.trainer, "producer": snap.producer}
    return (
        ((name,), role.silent_ms / 1000)
        for name, role in roles.items()
        if role.silent_ms is not None
    )


def _waited(snap: Snapshot) -> float:
    return int(snap.control.get("trainer_waited_ms", 0)) / 1000


def _workers(snap: Snapshot) -> Cells:
    counts = Counter({state.value: 0 for state in WorkerState})
    counts.update(worker.state for worker in snap.live_workers)
    counts["silent"] = len(snap.workers) - len(snap.live_workers)
    return (((state,), number) for state, number in counts.items())


def _per_worker(read: WorkerNumber) -> Any:
    """Read a number of every live worker; those that do not report it are left out."""

    def cells(snap: Snapshot) -> Cells:
        read_ones = ((worker.id, read(worker)) for worker in snap.live_workers)
        return (((name,), number) for name, number in read_ones if number is not None)

    return cells


def _judge_times(snap: Snapshot) -> Iterator[Times]:
    return (((worker.id,), worker.judge_times) for worker in snap.live_workers)


def _marks(snap: Snapshot) -> Cells:
    return iter([(("low",), snap.memory.low), (("high",), snap.memory.high)])
