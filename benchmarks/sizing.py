"""Measure what a group costs the server, by the length of its responses.

    python -m benchmarks.sizing                         # the embedded server, by TCP; a minute
    python -m benchmarks.sizing redis://host:6379/0     # a server of yours, which must be empty

Prints the constants of `producer_workers/simulation/server_load.py`: a line through the measured
lengths. Groups of 8 rollouts pass enqueue, claim, submit, take, read and commit. 16 submits come at
once, as those of a fleet do: a server writes to disk together what comes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Annotated, NamedTuple

import numpy as np
import redis
import typer

from benchmarks import sample
from benchmarks.bench_run import TASK, BenchRun
from benchmarks.memory import used_bytes
from benchmarks.server import BenchServer, connect, durable_server
from buffer.manifest import Manifest
from consumer.handle.reader import BatchReader

LENGTHS = (512, 2048, 8192, 32_768)
BYTES_A_ROUND = 100 * 2**20
"""So much passes per length, so that short groups are many, and long ones fit."""
BATCH = 64
AT_ONCE = 16
PORT = 26379


class Cost(NamedTuple):
    """What one group costs."""

    tokens: int
    bytes: float
    """of its payload"""
    cpu_us: float
    """of all threads of the server"""
    held: float
    """memory while it is ready"""
    received: float
    sent: float
    appended: float
    """bytes added to the append-only file"""


def measure(server: BenchServer, length: int) -> Cost:
    shape = sample.Shape(8, 512, length)
    tokens = shape.samples * length
    groups = max(16, min(512, BYTES_A_ROUND // (13 * tokens)))
    bench = BenchRun(server, batch_size=BATCH, high_bytes=2**34, low_bytes=2**33)
    made = [sample.written(f"{TASK}-{number:010d}", shape, "word") for number in range(groups)]
    before, free = _counted(server), used_bytes(server)
    jobs = bench.claim(groups, shape)
    with ThreadPoolExecutor(AT_ONCE) as callers:
        list(callers.map(lambda job, group: bench.submit([job], [group]), jobs, made))
    held = (used_bytes(server) - free) / groups
    step, left, read = 0, groups, BatchReader(bench.run)
    payload_bytes = 0
    while left:
        step, size = step + 1, min(BATCH, left)
        manifest = bench.run.ledger.take(bench.trainer, step, {TASK: size})
        assert isinstance(manifest, Manifest)
        read.read(manifest)
        payload_bytes += sum(entry.payload.size for entry in manifest.entries)
        bench.run.ledger.commit(bench.trainer, step, step)
        left -= size
    spent = (_counted(server) - before) / groups
    bench.check()
    server.clear()
    cpu_s, received, sent, appended = spent.tolist()
    return Cost(tokens, payload_bytes / groups, 1e6 * cpu_s, held, received, sent, appended)


def _counted(server: BenchServer) -> np.ndarray:
    """Return seconds of processor, bytes received and sent, and bytes of the append-only file."""
    info = server.raw.info("everything")
    file = info.get("aof_current_size", 0)
    cpu_s = info["used_cpu_user"] + info["used_cpu_sys"]
    network = info["total_net_input_bytes"], info["total_net_output_bytes"]
    return np.array([cpu_s, *network, file], float)


def line(costs: Sequence[Cost], name: str) -> tuple[float, float]:
    """Return what a group costs without bytes, and what each byte of its payload adds."""
    x = np.array([cost.bytes for cost in costs])
    y = np.array([getattr(cost, name) for cost in costs])
    # relative errors count, so that the shortest groups are as well described as the longest
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    return float(start), float(slope)


def main(url: Annotated[str, typer.Argument()] = "") -> None:
    found = nullcontext(connect("yours", url)) if url else durable_server(PORT)
    with found as server:
        if server.raw.dbsize():
            raise SystemExit(f"{url} is not empty, and would be afterwards: name another server")
        # a rewrite of the file would hide what was added to it; a managed server forbids this
        with suppress(redis.ResponseError):
            server.raw.config_set("auto-aof-rewrite-percentage", 0)
        measure(server, LENGTHS[0])  # warm
        costs = [measure(server, length) for length in LENGTHS]
    typer.echo("tokens  " + "  ".join(name for name in Cost._fields[1:]))
    for cost in costs:
        typer.echo(f"{cost.tokens:7,} " + "  ".join(f"{value:12,.0f}" for value in cost[1:]))
    for name in ("bytes", "cpu_us", "held", "received", "sent", "appended"):
        start, slope = line(costs, name)
        typer.echo(f"{name}: {start:,.0f} for a group, {slope:.3g} for each byte of it")


if __name__ == "__main__":
    typer.run(main)
