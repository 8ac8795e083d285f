"""Measure the server's processor time for 1 to 1,000 workers with 32 groups each, index data only.

The client's calls are the real ones, but come as fast as they can from one process, some at once,
as those of a fleet do: what comes together, a durable server writes to disk together. Only the
server's own processor time counts (`INFO cpu`). What each kind of call takes, times how often a
fleet makes it, is the share of one core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil

from benchmarks import sample
from benchmarks.bench_run import TASK, WEIGHTS, BenchRun
from benchmarks.figure import Figure
from benchmarks.server import BenchServer
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.ids import group_id, new_nonce
from buffer.janitor import IN_TURN
from buffer.job import Job

HELD = 32
"""Groups that a worker holds."""

HEARTBEAT_S = 2.0
LEASE_S = 10.0
SWEEP_S = 5.0
BATCH = 256
"""A worker sends a heartbeat, and sweeps in turn, so often; the trainer takes so many groups."""

MOVED = 4
"""Groups of each worker that end, and are claimed, in one round; one of each in a large fleet."""

AT_ONCE = 16
"""Calls under way. 1,000 workers make some 3,000 a second: about as many as come while one is
written to disk.
"""

AT_LEAST = 400
"""Calls of each kind, so that the clock of the kernel has something to measure."""


LONG_FROM = 5000
"""Workers from which on a group takes 300 s and not 30, as long contexts do."""

ASKED = {
    ("in memory", 1000): 0.4,
    ("durable", 1000): 0.5,
    ("in memory", 5000): 0.6,
    ("durable", 5000): 0.6,
}
"""Cores, by server and workers."""


def scale(server: BenchServer, sizes: tuple[int, ...]) -> Iterator[Figure]:
    """Return the cores that the server uses for each number of workers."""
    section = f"scale, {server.name}"
    for workers in sizes:
        cost_us = _Crowd(server, workers).cost_us()
        cores = sum(cost_us[call] * rate / 1e6 for call, rate in rates(workers).items())
        asked = ASKED.get((server.name, workers))
        yield Figure(section, f"{workers:,} workers", cores, "cores", asked, "less")
        for call, cost in cost_us.items():
            yield Figure(
                section,
                f"{call}, {workers:,} workers",
                cost,
                "us of a core",
                detail=workers < 1000,
            )
        server.clear()


def rates(workers: int) -> dict[str, float]:
    """Return the calls per second of a fleet, its producer and its trainer."""
    groups = workers * HELD / (300.0 if workers >= LONG_FROM else 30.0)
    return {
        "heartbeat": workers / HEARTBEAT_S,
        "sweep": min(workers / SWEEP_S, IN_TURN / LEASE_S),
        "no sweep, out of turn": workers / SWEEP_S,
        "enqueue, per group": groups,
        "claim": groups,
        "submit": groups,
        "take and commit, per group": groups,
    }


class _Crowd:
    """`workers` that hold 32 groups each."""

    def __init__(self, server: BenchServer, workers: int) -> None:
        self._server = server
        self._bench = BenchRun(server, lease_ms=86_400_000, batch_size=BATCH)
        self._run = self._bench.run
        self._nonces = {f"w{number}": new_nonce() for number in range(workers)}
        self._held: dict[str, list[Job]] = {name: [] for name in self._nonces}
        self._spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._step = 0
        self._moved = MOVED if workers < LONG_FROM else 1
        self._callers = ThreadPoolExecutor(AT_ONCE)
        for name, nonce in self._nonces.items():
            self._run.fleet.register(name, nonce, {"engine": "none"})
        self._enqueue(workers * HELD)
        for name in self._nonces:
            self._claim(name, HELD)

    def cost_us(self) -> dict[str, float]:
        """Microseconds of the server for a call of each kind."""
        workers = len(self._nonces)
        for _ in range(ceil(AT_LEAST / workers)):
            self._measure("heartbeat", workers, self._beat_all)
            self._measure("sweep", workers, lambda: self._all_at_once(self._sweep))
            self._measure(
                "no sweep, out of turn", workers, lambda: self._all_at_once(self._do_not_sweep)
            )
        moved = workers * self._moved
        for _ in range(ceil(AT_LEAST / moved)):
            self._measure("submit", moved, self._submit_all)
            self._measure("enqueue, per group", moved, lambda: self._enqueue(moved))
            self._measure("claim", moved, self._claim_all)
        ready = self._run.buffer.count(TASK, "completed") // BATCH * BATCH
        if ready:
            self._measure("take and commit, per group", ready, lambda: self._take(ready // BATCH))
        self._callers.shutdown()
        self._bench.check()
        return {call: 1e6 * seconds / count for call, (seconds, count) in self._spent.items()}

    def _measure(self, call: str, count: int, do: Callable[[], object]) -> None:
        before = self._cpu_s()
        do()
        self._spent[call][0] += self._cpu_s() - before
        self._spent[call][1] += count

    def _cpu_s(self) -> float:
        used = self._server.raw.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def _enqueue(self, count: int) -> None:
        for _ in range(0, count, 64):
            cursor = self._run.jobs.cursor(TASK)
            size = min(64, count)
            gids = [group_id(TASK, cursor + place) for place in range(size)]
            self._run.payloads.write_prompts(
                {gid: sample.prompt(gid, sample.SMALL) for gid in gids}
            )
            self._run.jobs.enqueue(
                self._bench.producer, new_nonce(), TASK, cursor, [1] * size, 10**9
            )
            count -= size

    def _claim(self, name: str, limit: int) -> None:
        claim = self._run.jobs.claim(name, self._nonces[name], new_nonce(), WEIGHTS, limit)
        self._held[name] += claim.jobs

    def _claim_all(self) -> None:
        # one by one: in a steady state a worker claims whenever a group of its own has ended
        for _ in range(self._moved):
            self._all_at_once(lambda name: self._claim(name, 1))

    def _beat_all(self) -> None:
        self._all_at_once(self._beat)

    def _beat(self, name: str) -> None:
        pulse = HeartbeatReport(1, WEIGHTS, WorkerState.WORKING, tokens_per_s=1e4, done=5)
        beat = self._run.fleet.heartbeat(name, self._nonces[name], pulse, self._held[name])
        self._run.adopt_limits(beat.limits)

    def _sweep(self, _: str) -> None:
        self._run.janitor.sweep(files=False, archive=False)

    def _do_not_sweep(self, _: str) -> None:
        self._run.janitor.sweep_in_turn()  # a lease is a day here: somebody has

    def _submit_all(self) -> None:
        self._all_at_once(self._submit)

    def _submit(self, name: str) -> None:
        ended = self._held[name][: self._moved]
        self._held[name] = self._held[name][self._moved :]
        for job in ended:
            self._run.buffer.submit(name, job, sample.group(job.gid, sample.SMALL), 1)

    def _all_at_once(self, call: Callable[[str], object]) -> None:
        """One call of each worker."""
        for _ in self._callers.map(call, self._nonces):
            pass

    def _take(self, batches: int) -> None:
        for _ in range(batches):
            self._step += 1
            self._run.ledger.take(self._bench.trainer, self._step, {TASK: BATCH})
            self._run.ledger.commit(self._bench.trainer, self._step, self._step)
