"""Run simulated workers in processes: the real `Worker`, heartbeat and scripts, but no model.

Each rollout makes exactly as many tokens as its draw says, whatever its worker, so that a run of
the pipeline and the discrete-event model are asked about the same work.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.engines.base import Generation
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.judges.judge import FunctionJudge
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.testing import Characters

VOCABULARY = 95


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Workers in one process: `sequences` per engine at once, `concurrency` groups per worker."""

    url: str
    run: str
    task: str
    workers: Sequence[str]
    token_s: float
    sequences: int
    concurrency: int
    partial_rollout: bool = False


@dataclass(slots=True)
class Meter:
    """What engines made: tokens by group, also repeated ones; requests, and aborted requests."""

    tokens: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    requests: int = 0
    aborted: int = 0

    def add(self, other: Meter) -> None:
        self.tokens += other.tokens
        self.busy_s += other.busy_s
        self.requests += other.requests
        self.aborted += other.aborted


class MeteredEngine(SimulatedEngine):
    """A simulated engine that counts, on its own clock."""

    def __init__(self, config: SimulatedConfig, token_s: float, meter: Meter) -> None:
        super().__init__(config, FIRST_WEIGHTS)
        self._token_s = token_s
        self._meter = meter

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        made = await super().generate(request_id, prompt_ids, params)
        self._meter.requests += 1
        self._meter.aborted += made.finish_reason == "abort"
        self._meter.tokens[request_id.partition("/")[0]] += len(made.token_ids)
        self._meter.busy_s += len(made.token_ids) * self._token_s
        return made

    def under_way_s(self) -> float:
        """Seconds that running requests have generated so far."""
        clock_s = self._clock()
        return sum(clock_s - run.started_s for run in self._running if run.started_s is not None)


@contextmanager
def working(plans: Sequence[FleetPlan]) -> Iterator[list[Connection]]:
    """One process for each plan, until the end of the block; ask them with `read_meters`."""
    context = multiprocessing.get_context("spawn")
    ends: list[tuple[Any, Connection]] = []
    for plan in plans:
        here, there = context.Pipe()
        process = context.Process(target=_live, args=(plan, there), daemon=True)
        process.start()
        there.close()
        ends.append((process, here))
    try:
        for _, here in ends:
            here.recv()  # all of its workers are registered
        yield [here for _, here in ends]
    finally:
        for process, here in ends:
            here.close()
            process.join(30)
            process.kill()


def read_meters(fleets: Sequence[Connection]) -> Meter:
    """Return what all engines have made so far, running requests included."""
    total = Meter()
    for fleet in fleets:
        fleet.send("read")
    for fleet in fleets:
        total.add(fleet.recv())
    return total


def _live(plan: FleetPlan, owner: Connection) -> None:
    # each engine warns that nobody should train on it
    logging.getLogger("producer_workers.engines.simulated").setLevel(logging.ERROR)
    asyncio.run(_work(plan, owner))


async def _work(plan: FleetPlan, owner: Connection) -> None:
    loop = asyncio.get_running_loop()
    # a real worker has a process, and its threads, of its own
    loop.set_default_executor(ThreadPoolExecutor(6 * len(plan.workers)))
    run = Run.open(Store(plan.url, name="fleet"), plan.run)
    meter = Meter()
    engines = [_engine(plan, meter) for _ in plan.workers]
    workers = [
        _worker(plan, run, engine, name) for engine, name in zip(engines, plan.workers, strict=True)
    ]
    for engine in engines:
        await engine.start()
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    while {row.id for row in await asyncio.to_thread(run.fleet.workers)} < set(plan.workers):
        await asyncio.sleep(0.05)
    gone = asyncio.Event()
    threading.Thread(target=_answer, args=(owner, loop, meter, engines, gone), daemon=True).start()
    await gone.wait()
    for worker in workers:
        worker.stop()
    await asyncio.gather(*tasks, return_exceptions=True)


def _engine(plan: FleetPlan, meter: Meter) -> MeteredEngine:
    config = SimulatedConfig(
        first_token_s=Fixed(value=plan.token_s),
        token_s=Fixed(value=plan.token_s),
        response_tokens=Fixed(value=1),
        max_num_seqs=plan.sequences,
        vocab_size=VOCABULARY,
    )
    return MeteredEngine(config, plan.token_s, meter)


def _worker(plan: FleetPlan, run: Run, engine: MeteredEngine, name: str) -> Worker:
    partial = plan.partial_rollout
    judge = FunctionJudge("none", _worth_nothing)
    loop = SingleTurnAgentLoop(
        judge=judge, tokenizer=Characters(), eos_ids={VOCABULARY}, partial_rollout=partial
    )
    runners = {plan.task: TaskRunner(loop, partial)}
    limits = WorkerSection(concurrency=plan.concurrency, drain_timeout_s=0.0)
    return Worker(run, engine, runners, limits, worker_id=name)


async def _worth_nothing(**_: object) -> float:
    return 0.0


def _answer(
    owner: Connection,
    loop: asyncio.AbstractEventLoop,
    meter: Meter,
    engines: Sequence[MeteredEngine],
    gone: asyncio.Event,
) -> None:
    """Report that this fleet is ready, and answer its owner until the pipe is closed.

    Runs on its own thread.
    """

    async def read() -> Meter:
        under_way_s = sum(engine.under_way_s() for engine in engines)
        return Meter(
            Counter(meter.tokens), meter.busy_s + under_way_s, meter.requests, meter.aborted
        )

    owner.send("up")
    try:
        while owner.recv():
            owner.send(asyncio.run_coroutine_threadsafe(read(), loop).result())
    except (EOFError, OSError):
        loop.call_soon_threadsafe(gone.set)
