"""Measure what the pipeline costs a real vLLM engine, against the engine alone.

Both have the same engine, prompts and lengths, and run in turns. The bare engine is asked for
everything at once: none of its places is free before the end. The worker has just as many groups at
once as fill the engine. Then weights are updated while requests run: how long nothing is sampled,
and what of the responses is missing (nothing may be).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks.figure import Figure, ratio
from benchmarks.server import BenchServer
from benchmarks.updates import WatchedUpdates, figures_of
from buffer.ids import group_id, new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.agent_loops.tokenizer import load_tokenizer
from producer_workers.config.engine import VllmConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation
from producer_workers.engines.vllm.api import is_cpu_build
from producer_workers.judges.load import load_judge
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.config.small_model import TinyModelConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model

TASK = "math"
MEMBERS = 8
UPDATES = 8
SAMPLED = 64
AT_ONCE = SAMPLED // MEMBERS
"""Groups in work at once: exactly as many as fill the engine."""

LOOK_S = 0.05
"""How often the end is looked for."""

CPU_TARGET = 0.95
GPU_TARGET = 0.97
Drive = Callable[["Watched", int], Awaitable["Round"]]
"""Runs round number n on an engine."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round.

    `cpu_s` is the time of this process, which has the worker but not the engine; `taken` is the
    share of the engine's capacity in use, between the first request and the last answer.
    """

    tokens: int
    wall_s: float
    cpu_s: float
    taken: float


class Watched:
    """An engine, and how many of its places are taken."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests = 0
        self._seconds = 0.0
        self._first = 0.0
        self._last = 0.0

    async def generate(self, *about: Any) -> Generation:
        self._look(1)
        try:
            return await self._engine.generate(*about)
        finally:
            self._look(-1)

    def taken(self) -> float:
        return self._seconds / (SAMPLED * (self._last - self._first))

    def _look(self, more: int) -> None:
        now = time.perf_counter()
        self._first = self._first or now
        self._seconds += min(self._requests, SAMPLED) * (now - (self._last or now))
        self._requests = self._requests + more
        self._last = now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


SMALL = TinyModelConfig(max_positions=512)


def engine(
    server: BenchServer, groups: int, rounds: int, spec: TinyModelConfig = SMALL
) -> Iterator[Figure]:
    """Return the tokens per second of both ways over `rounds` rounds; nothing for 0 rounds."""
    if not rounds:
        return
    with TemporaryDirectory(prefix="rmq-bench-") as folder, asyncio.Runner() as runner:
        model = Path(folder, "model")
        other = Path(folder, "other")
        for seed, path in enumerate((model, other)):
            build_tiny_model(path, spec, seed)
        ours = build_engine(
            VllmConfig(max_model_len=512, max_num_seqs=SAMPLED, omp_threads=1), model, FIRST_WEIGHTS
        )
        runner.run(ours.start())
        try:
            yield from runner.run(_compare(server, ours, model, groups, rounds))
            yield from runner.run(_update(ours, (other, model)))
        finally:
            runner.run(ours.shutdown())


async def _compare(
    server: BenchServer, engine: Engine, model: Path, groups: int, rounds: int
) -> list[Figure]:
    async def direct(watched: Watched, _: int) -> Round:
        return await _drive_directly(watched, groups)

    async def pipeline(watched: Watched, number: int) -> Round:
        return await _drive_by_worker(server, watched, model, groups, f"engine-{number}")

    ways: Mapping[str, Drive] = {"engine alone": direct, "worker": pipeline}
    made: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, drive in ways.items():
            one = await drive(Watched(engine), number)
            made[name] += [one] if number else []  # the first round warms up
    section = f"vLLM and the pipeline, {server.name}"
    return [figure for name in ways for figure in _of_way(section, name, made[name])] + [
        _ratio(section, made)
    ]


def _of_way(section: str, name: str, made: Sequence[Round]) -> Iterator[Figure]:
    yield Figure(section, name, median(one.tokens / one.wall_s for one in made), "tokens/s")
    yield Figure(
        section,
        f"{name}: own CPU",
        median(1e6 * one.cpu_s / one.tokens for one in made),
        "us/token",
    )
    yield Figure(
        section, f"{name}: the engine's places taken", 100 * median(one.taken for one in made), "%"
    )


def _ratio(section: str, made: Mapping[str, Sequence[Round]]) -> Figure:
    wall = {name: [one.wall_s / one.tokens for one in rounds] for name, rounds in made.items()}
    target = CPU_TARGET if is_cpu_build() else GPU_TARGET
    return Figure(
        section, "worker / engine alone", ratio(wall, "worker", "engine alone"), "", target
    )


def _states(draw: int) -> list[RolloutState]:
    """Return the members of a group, with 32 to 159 tokens each, in a shuffled order."""
    lengths = [32 + (draw * 37 + place * 53) % 128 for place in range(MEMBERS)]
    prompt = np.arange(10, 26, dtype="<i4") + draw % 20
    return [
        RolloutState(
            index=place,
            messages=[{"role": "user", "content": "?"}],
            prompt_ids=prompt,
            ground_truth="7",
            sample_params=SampleParams(
                max_tokens=length, min_tokens=length, seed=draw * MEMBERS + place
            ),
        )
        for place, length in enumerate(lengths)
    ]


async def _drive_directly(engine: Watched, groups: int) -> Round:
    states = [(draw, state) for draw in range(groups) for state in _states(draw)]
    began = time.perf_counter()
    used = time.process_time()
    made = await asyncio.gather(*(_ask(engine, draw, state) for draw, state in states))
    took = time.perf_counter() - began
    spent = time.process_time() - used
    return Round(sum(len(generation.token_ids) for generation in made), took, spent, engine.taken())


async def _ask(engine: Engine | Watched, draw: int, state: RolloutState) -> Generation:
    assert state.prompt_ids is not None
    return await engine.generate(
        f"{group_id(TASK, draw)}/{state.index}", state.prompt_ids, state.sample_params
    )


async def _drive_by_worker(
    server: BenchServer, engine: Watched, model: Path, groups: int, name: str
) -> Round:
    """Run a worker from its registration to the last group in the pool."""
    run = await asyncio.to_thread(_waiting_run, server, groups, name)
    judge = load_judge("exact_match")
    tokenizer = load_tokenizer(str(model))
    runner = TaskRunner(SingleTurnAgentLoop(judge=judge, tokenizer=tokenizer, eos_ids=set()))
    limits = WorkerSection(concurrency=AT_ONCE)
    worker = Worker(run, cast(Engine, engine), {TASK: runner}, limits, worker_id="bench")
    began = time.perf_counter()
    used = time.process_time()
    working = asyncio.create_task(worker.run())
    while (await asyncio.to_thread(run.buffer.count_statuses, TASK))[TASK].completed < groups:
        await asyncio.sleep(LOOK_S)
        if working.done():
            working.result()
    took = time.perf_counter() - began
    spent = time.process_time() - used
    worker.stop()
    await working
    tokens = sum(
        state.sample_params.max_tokens for draw in range(groups) for state in _states(draw)
    )
    return Round(tokens, took, spent, engine.taken())


def _waiting_run(server: BenchServer, groups: int, name: str) -> Run:
    """Return a run whose groups wait for a worker."""
    run = Run.create(
        server.store, name, new_nonce(), RunLimits(tasks={TASK: TaskLimits()}), FIRST_WEIGHTS, ""
    )
    producer = new_nonce()
    run.control.open_producer(producer)
    run.trainers.open(new_nonce(), step=0, lineage="bench")
    gids = [group_id(TASK, draw) for draw in range(groups)]
    prompts = {
        gid: group_bytes.encode(RolloutGroup(gid, TASK, _states(draw)))
        for draw, gid in enumerate(gids)
    }
    run.payloads.write_prompts(prompts)
    run.jobs.enqueue(producer, new_nonce(), TASK, 0, [MEMBERS] * groups, 10_000)
    return run


async def _update(engine: Engine, folders: tuple[Path, Path]) -> list[Figure]:
    """Update weights while the engine is full."""
    states = [state for draw in range(SAMPLED // MEMBERS) for state in _states(draw)]

    async def sample() -> list[Generation]:
        return await asyncio.gather(*(_ask(engine, *one) for one in enumerate(states)))

    watched = WatchedUpdates(engine)
    updates = [await watched.update(folders[number % 2], sample) for number in range(UPDATES)]
    return list(figures_of(f"weight update while {SAMPLED} requests run", updates))
