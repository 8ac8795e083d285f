"""From `pause()` to the last receipt, with simulated workers whose engines answer at once.

In keep mode, between groups that end and begin: each rollout must have been asked for once, and be
there as a whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.figure import Figure
from benchmarks.fleet import read_meters
from benchmarks.server import BenchServer
from benchmarks.simulated_run import TASK, SimulatedRun, simulated_run
from producer_workers.simulation.setting import Setting

PROCESSES = 2
BOUNDS_MS = (2.5, 5, 10, 20, 50, 100, 250)
WARM_UP = 3


def pause(server: BenchServer, pauses: int, workers: int) -> Iterator[Figure]:
    """Milliseconds of `pauses` with so many workers, in two processes."""
    setting = Setting(
        workers=workers,
        sequences=8,
        concurrency=4,
        group_size=2,
        batch_size=workers,
        token_s=0.05 * workers / 64,  # all of them together end some 40 groups in a second
        step_s=0,
        max_staleness=3,
    )
    with simulated_run(
        server, setting, lambda draw: [100 + draw % 100] * 2, processes=PROCESSES
    ) as work:
        took_ms = [_pause_once(work, number) * 1000 for number in range(WARM_UP + pauses)][WARM_UP:]
        _check_tokens(work, workers)
    section = f"pause, {workers} workers, {server.name}"
    yield Figure(section, "p50", float(np.percentile(took_ms, 50)), "ms", 5, "less")
    yield Figure(section, "p99", float(np.percentile(took_ms, 99)), "ms", 20, "less")
    for low, high in zip((0, *BOUNDS_MS), (*BOUNDS_MS, np.inf), strict=True):
        count = sum(low <= ms < high for ms in took_ms)
        yield Figure(section, f"{low:g} to {high:g} ms", count, "pauses")
    server.clear()


def _pause_once(work: SimulatedRun, number: int) -> float:
    time.sleep(random.Random(number).uniform(0.05, 0.15))
    with work.consumer.paused("keep") as seconds:
        pass
    work.run.receipts.wait(work.run.control.state())
    return seconds


def _check_tokens(work: SimulatedRun, groups: int) -> None:
    """Raise AssertionError if a rollout was requested twice, or lacks tokens."""
    batch = work.consumer.take_batch(1, {TASK: groups})
    meter = read_meters(work.fleets)
    if meter.aborted:
        raise AssertionError(f"{meter.aborted} requests were aborted in keep mode")
    for group in batch.groups:
        made = meter.tokens[group.gid]
        held = int(group.lengths.sum())
        if made != held:
            raise AssertionError(f"{group.gid}: {made} tokens were generated, {held} arrived")
