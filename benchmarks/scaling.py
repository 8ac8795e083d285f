"""What the index costs as it grows: server time of single script calls, as the server counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks.bench_run import TASK, BenchRun
from benchmarks.figure import Figure
from benchmarks.fill import fill
from benchmarks.server import BenchServer
from buffer.redis.scripts import library

BATCH = 512
THRESHOLD = 5
CALL_LIMIT_MS = 5.0
LIMITS_US = {"take": 3000.0, "refresh": 50.0}


def scaling(server: BenchServer, sizes: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    """take, count, is_ready and refresh with `sizes` groups in the pool, the sizes in turns."""
    runs = {size: BenchRun(server, f"bench-{size}", stale_threshold=THRESHOLD) for size in sizes}
    for size, run in runs.items():
        fill(run, size)
    server.raw.config_set("slowlog-log-slower-than", 200)
    server.raw.config_set("slowlog-max-len", 100_000)
    server.raw.slowlog_reset()
    yield from _steady(runs, rounds)
    yield from _expiring(runs)
    for run in runs.values():
        _train_and_fork(run)
        run.check()
    yield from _slowest(server)
    server.clear()


def _steady(runs: dict[int, BenchRun], rounds: int) -> Iterator[Figure]:
    calls: dict[str, Callable[[BenchRun], object]] = {
        f"take {BATCH}": lambda run: run.run.ledger.take(run.trainer, 1, {TASK: BATCH}),
        "count": lambda run: run.run.buffer.count(TASK),
        "is_ready": lambda run: run.run.buffer.is_ready({TASK: BATCH}),
        "refresh, nothing expired": lambda run: run.run.buffer.refresh_staleness(TASK),
    }
    for name, call in calls.items():
        taken: dict[int, list[float]] = {size: [] for size in runs}
        for _ in range(rounds):
            for size, run in runs.items():
                taken[size].append(server_us(run, call))
                run.undo_take(1)
        yield from _by_size(name, {size: median(times) for size, times in taken.items()})


def _by_size(name: str, times: dict[int, float]) -> Iterator[Figure]:
    smallest = min(times)
    largest = max(times)
    for size, us in times.items():
        limit = LIMITS_US.get(name.partition(" ")[0])
        yield Figure("scaling", f"{name}, {size:,} groups", us, "us", limit, "less")
    yield Figure(
        "scaling",
        f"{name}, {largest:,} / {smallest:,}",
        times[largest] / times[smallest],
        "x",
        2.0,
        "less",
    )


def _expiring(runs: dict[int, BenchRun]) -> Iterator[Figure]:
    """Expire k groups; the cost per group must not depend on how many expire, or stay."""
    for size, run in runs.items():
        steps = dict.fromkeys(("taken", "committed", "keep", "freed", "forgotten"), THRESHOLD)
        run.raw.hset(run.keys.ledger("train"), mapping=steps)
        for k in (100, 1000, 10_000):
            if k * 2 <= size:
                _age(run, k)
                us = server_us(run, lambda run: run.run.buffer.refresh_staleness(TASK))
                yield Figure("expiring", f"{k:,} of {size:,}", us / k, "us/group")


def _train_and_fork(run: BenchRun) -> None:
    """Measure other scripts that work in slices; their longest calls count, too."""
    step = THRESHOLD + 1
    run.run.ledger.take(run.trainer, step, {TASK: min(BATCH, run.run.buffer.count(TASK))})
    run.run.ledger.commit(run.trainer, step, step)
    run.run.janitor.sweep()
    run.run.trainers.open(run.trainer, step=step, lineage="l2", take_over=True)


def _age(run: BenchRun, count: int) -> None:
    """Let all but `count` groups be of a policy version that may still be used."""
    pool = run.keys.pool(TASK, "completed")
    if run.raw.zcount(pool, 1, "+inf") == 0:
        run.raw.eval(_RENEW, 1, pool)
    oldest = run.raw.zrange(pool, 0, count - 1)
    run.raw.zadd(pool, dict.fromkeys(oldest, 0), xx=True)


_RENEW = """
local members = redis.call('ZRANGE', KEYS[1], 0, -1)
for _, member in ipairs(members) do redis.call('ZADD', KEYS[1], 'XX', 1, member) end
"""


def server_us(run: BenchRun, call: Callable[[BenchRun], object]) -> float:
    """Server time of the commands of one call, without that of taking them off the wire."""
    run.raw.config_resetstat()
    call(run)
    stats: dict[str, Any] = run.raw.info("commandstats")
    scripts = [
        entry["usec"]
        for name, entry in stats.items()
        if name in ("cmdstat_evalsha", "cmdstat_eval")
    ]
    others = [entry["usec"] for name, entry in stats.items() if name == "cmdstat_zcard"]
    return float(sum(scripts or others))


def _slowest(server: BenchServer) -> Iterator[Figure]:
    names = {script.sha: name for name, script in library().items()}
    slowest: dict[str, int] = {}
    for entry in server.raw.slowlog_get(100_000):
        words = entry["command"].split(b" ", 2)
        if words[0] == b"EVALSHA" and (name := names.get(words[1].decode())):
            slowest[name] = max(slowest.get(name, 0), entry["duration"])
    for name, us in sorted(slowest.items()):
        yield Figure("slowest call", name, us / 1000, "ms", CALL_LIMIT_MS, "less")
