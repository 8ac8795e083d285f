"""What the pipeline costs a real vLLM engine: a worker through server, scripts and judge, against the bare engine.

Both have the same engine, prompts, lengths and number of groups at once, and run in turns. Then weights are updated
while requests run: how long nothing is sampled, and what of the responses is missing (nothing may be).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.figure import Figure, ratio
from benchmarks.server import BenchServer
from buffer import wire
from buffer.control import new_nonce
from buffer.group import RolloutGroup
from buffer.keys import group_id
from buffer.limits import RunLimits, TaskLimits
from buffer.open_run import INITIAL
from buffer.rollout import PolicyVersion, RolloutState, SampleParams
from buffer.run import Run
from consumer.tiny_model import build_tiny_model
from consumer.tiny_model_config import TinyModelConfig
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation
from producer_workers.engines.config import VllmConfig
from producer_workers.engines.environment import is_cpu_build
from producer_workers.judges.load import load_judge
from producer_workers.task_runner import TaskRunner
from producer_workers.tokenizer import load_tokenizer
from producer_workers.worker import Worker

TASK, MEMBERS = "math", 8
AT_ONCE = 16
"""Groups in work at once: twice as many as the engine samples, so that none of its places is free meanwhile."""

FIRST = PolicyVersion(INITIAL, 0)
UPDATES, SAMPLED = 8, 64
CPU_TARGET, GPU_TARGET = 0.95, 0.97
Drive = Callable[[int], Awaitable[int]]
"""Runs round number n, and returns its tokens."""


def engine(server: BenchServer, groups: int, rounds: int) -> Iterator[Figure]:
    """Tokens per second of both ways, over `rounds` rounds of so many groups; nothing where no round is asked for."""
    if not rounds:
        return
    with TemporaryDirectory(prefix="rmq-bench-") as folder, asyncio.Runner() as runner:
        model, other = Path(folder, "model"), Path(folder, "other")
        for seed, path in enumerate((model, other)):
            build_tiny_model(path, TinyModelConfig(max_positions=512), seed)
        ours = build_engine(VllmConfig(max_model_len=512, max_num_seqs=SAMPLED, omp_threads=1), model, FIRST)
        runner.run(ours.start())
        try:
            yield from runner.run(_compare(server, ours, model, groups, rounds))
            yield from runner.run(_update(ours, (other, model)))
        finally:
            runner.run(ours.shutdown())


async def _compare(server: BenchServer, engine: Engine, model: Path, groups: int, rounds: int) -> list[Figure]:
    async def direct(_: int) -> int:
        return await _drive_directly(engine, groups)

    async def pipeline(number: int) -> int:
        return await _drive_by_worker(server, engine, model, groups, f"engine-{number}")

    ways: Mapping[str, Drive] = {"engine alone": direct, "worker": pipeline}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, drive in ways.items():
            began, used = time.perf_counter(), time.process_time()
            tokens = await drive(number)
            if number:  # the first round warms up
                wall[name].append((time.perf_counter() - began) / tokens)
                cpu[name].append((time.process_time() - used) / tokens)
    section = f"vLLM and the pipeline, {server.name}"
    target = CPU_TARGET if is_cpu_build() else GPU_TARGET
    figures = [Figure(section, name, 1 / median(wall[name]), "tokens/s") for name in ways]
    figures += [Figure(section, f"{name}: own CPU", 1e9 * median(cpu[name]) / 1e3, "us/token") for name in ways]
    return [*figures, Figure(section, "worker / engine alone", ratio(wall, "worker", "engine alone"), "", target)]


def _states(draw: int) -> list[RolloutState]:
    """The members of a group, which make 32 to 159 tokens each, in an order that looks like chance."""
    lengths = [32 + (draw * 37 + place * 53) % 128 for place in range(MEMBERS)]
    prompt = np.arange(10, 26, dtype="<i4") + draw % 20
    return [
        RolloutState(
            index=place,
            messages=[{"role": "user", "content": "?"}],
            prompt_ids=prompt,
            ground_truth="7",
            sample_params=SampleParams(max_tokens=length, min_tokens=length, seed=draw * MEMBERS + place),
        )
        for place, length in enumerate(lengths)
    ]


async def _drive_directly(engine: Engine, groups: int) -> int:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(draw: int) -> int:
        async with room:
            made = await asyncio.gather(*(_ask(engine, draw, state) for state in _states(draw)))
            return sum(len(generation.token_ids) for generation in made)

    return sum(await asyncio.gather(*(one(draw) for draw in range(groups))))


async def _ask(engine: Engine, draw: int, state: RolloutState) -> Generation:
    assert state.prompt_ids is not None
    return await engine.generate(f"{group_id(TASK, draw)}/{state.index}", state.prompt_ids, state.sample_params)


async def _drive_by_worker(server: BenchServer, engine: Engine, model: Path, groups: int, name: str) -> int:
    """A worker from its registration to the last group in the pool."""
    run = await asyncio.to_thread(_waiting_run, server, groups, name)
    judge, tokenizer = load_judge("exact_match"), load_tokenizer(str(model))
    runner = TaskRunner(SingleTurnAgentLoop(judge=judge, tokenizer=tokenizer, eos_ids=set()))
    worker = Worker(run, engine, {TASK: runner}, worker_id="bench", concurrency=AT_ONCE)
    working = asyncio.create_task(worker.run())
    while (await asyncio.to_thread(run.buffer.count_statuses, TASK))[TASK].completed < groups:
        await asyncio.sleep(0.02)
        if working.done():
            working.result()
    worker.stop()
    await working
    return sum(state.sample_params.max_tokens for draw in range(groups) for state in _states(draw))


def _waiting_run(server: BenchServer, groups: int, name: str) -> Run:
    """A run whose groups wait for a worker."""
    run = Run.create(server.store, name, new_nonce(), RunLimits(tasks={TASK: TaskLimits()}), FIRST, "")
    producer = new_nonce()
    run.control.open_producer(producer)
    run.trainers.open(new_nonce(), step=0, lineage="bench")
    gids = [group_id(TASK, draw) for draw in range(groups)]
    prompts = {gid: wire.encode(RolloutGroup(gid, TASK, _states(draw))) for draw, gid in enumerate(gids)}
    run.payloads.write_prompts(prompts)
    run.jobs.enqueue(producer, new_nonce(), TASK, 0, [MEMBERS] * groups, 10_000)
    return run


async def _update(engine: Engine, folders: tuple[Path, Path]) -> list[Figure]:
    """Weights come while all places are taken; each must have all of its tokens, and say which weights made which."""
    took, missing = [], 0
    for number in range(UPDATES):
        states = [state for draw in range(SAMPLED // MEMBERS) for state in _states(draw)]
        running = [asyncio.create_task(_ask(engine, place, state)) for place, state in enumerate(states)]
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        await engine.load_weights(folders[number % 2], PolicyVersion("bench", number))
        took.append(1000 * (time.perf_counter() - began))
        for state, made in zip(states, await asyncio.gather(*running), strict=True):
            stamped = sum(span.length for span in made.spans)
            missing += state.sample_params.max_tokens - min(stamped, len(made.token_ids))
    section = f"weight update while {SAMPLED} requests run"
    return [
        Figure(section, "nothing is sampled, p50", float(np.percentile(took, 50)), "ms"),
        Figure(section, "nothing is sampled, longest", max(took), "ms"),
        Figure(section, "tokens lost", missing, "", 0, "less"),
    ]
