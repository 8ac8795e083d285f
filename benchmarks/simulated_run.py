"""Run a producer that draws lengths, simulated workers in their own processes, and a trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.fleet import FleetPlan, working
from benchmarks.server import BenchServer
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import RolloutState
from buffer.wire.sampling import SampleParams
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.datasets.records import RecordsDataset, problem_of
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from producer_workers.simulation.setting import Lengths, Setting
from rolloutmq.testing import Characters

TASK = "math"
ENDLESS = 1_000_000

WORTH_A_PROCESS = 8
"""Workers: a process takes most of a second to start."""


class LengthSampler(Sampler):
    """Draws whose rollouts make exactly as many tokens as `lengths` says."""

    def __init__(self, lengths: Lengths) -> None:
        dataset = RecordsDataset([{"question": "?", "answer": ""}], "one", problem_of)
        super().__init__(TASK, dataset, Characters(), SampleParams())
        self._lengths = lengths

    def draw(self, draw: int) -> list[RolloutState]:
        params = [SampleParams(max_tokens=n, min_tokens=n) for n in self._lengths(draw)]
        prompt_ids = np.arange(4, dtype="<i4")
        return [
            RolloutState(index=index, prompt_ids=prompt_ids, sample_params=own)
            for index, own in enumerate(params)
        ]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A live run: its trainer is open, workers claim, and the producer draws since `started_s`."""

    run: Run
    consumer: RolloutConsumer
    fleets: Sequence[Connection]
    started_s: float


@contextmanager
def simulated_run(
    server: BenchServer,
    setting: Setting,
    lengths: Lengths,
    *,
    processes: int = 2,
    name: str = "simulated",
) -> Iterator[SimulatedRun]:
    """Start a producer (a thread), workers (in `processes`) and an open trainer for a setting."""
    limits = RunLimits(
        stale_threshold=setting.stale_threshold,
        ahead_threshold=(setting.max_ahead + 1) * setting.sync_weights_interval,
        sync_weights_interval=setting.sync_weights_interval,
        over_sample_threshold=setting.over_sample_threshold,
        on_straggler=setting.on_straggler,
        batch_size=setting.batch_size,
        steps=ENDLESS,
        tasks={TASK: TaskLimits()},
    )
    store = Store(server.store.url, name="simulated")
    run = Run.create(store, name, new_nonce(), limits)
    consumer = RolloutConsumer(run)
    consumer.open()
    stop = threading.Event()
    producer = Producer(run, {TASK: LengthSampler(lengths)}, strategies_of(run.limits))
    thread = threading.Thread(
        target=producer.produce_loop, args=(stop,), name="producer", daemon=True
    )
    try:
        with working(_plans(server.store.url, name, setting, processes)) as fleets:
            thread.start()
            yield SimulatedRun(run, consumer, fleets, time.monotonic())
            consumer.close()
            stop.set()
            thread.join()
    finally:
        stop.set()
        store.close()


def _plans(url: str, run: str, setting: Setting, processes: int) -> list[FleetPlan]:
    names = [f"w{number}" for number in range(setting.workers)]
    processes = min(processes, 1 + setting.workers // WORTH_A_PROCESS)
    return [
        FleetPlan(
            url,
            run,
            TASK,
            names[place::processes],
            setting.token_s,
            setting.sequences,
            setting.concurrency,
            setting.interruption == "partial",
        )
        for place in range(processes)
    ]
