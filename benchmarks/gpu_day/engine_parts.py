"""vLLM on the GPU: its logprobs against the trainer's, and how long a weight update stops it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from msgspec import structs

from benchmarks.engine import engine as through_the_queue
from benchmarks.figure import Figure
from benchmarks.gpu_day.rollouts import MEMBERS
from benchmarks.gpu_day.shapes import SHAPES, build_model
from benchmarks.publication import update
from benchmarks.server import memory_server
from benchmarks.updates import Update, WatchedUpdates, figures_of
from buffer.ids import group_id
from buffer.weights.shared_folder import FolderSender
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion, RolloutState, Status
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import SamplingMask
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.weights_folder import HostBuffers
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.policy import Policy
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import Engine, Generation

SAMPLED = 64
"""Requests that run at once."""

UPDATES = 4
COLOCATED_SHARE = 0.4
"""Of the GPU's memory, for an engine beside a trainer."""

PLAIN = SampleParams(max_tokens=128)
"""Without min_tokens: the engine's logprobs would leave out the end token before it."""

MASKED = SampleParams(max_tokens=128, top_p=0.8)

MEAN_NATS = 0.02
"""Largest mean distance of logprobs in bfloat16 that counts as the same model."""


def logprob_agreement(shape: str) -> Iterator[Figure]:
    """Yield how far the engine's logprobs are from the trainer's, for the same tokens."""
    with TemporaryDirectory(prefix="rmq-gpu-") as folder:
        model = Path(folder, "model")
        build_model(model, shape)
        prompts = _prompts(shape)
        made = asyncio.run(_sample(model, prompts))
        yield from _agreement(f"logprobs, {shape}", model, prompts, made)


def masked_agreement(shape: str) -> Iterator[Figure]:
    """Yield the same where top-p cuts off tokens, with the sampling mask and without."""
    section = f"logprobs with top_p = {MASKED.top_p:g}, {shape}"
    with TemporaryDirectory(prefix="rmq-gpu-") as folder:
        model = Path(folder, "model")
        build_model(model, shape)
        prompts = _prompts(shape)
        made = asyncio.run(_sample(model, prompts, MASKED))
        yield from _agreement(section, model, prompts, made)
        bare = [replace(one, columns={}) for one in made]
        yield from _agreement(f"{section}, without the mask", model, prompts, bare, bound=None)
    masks = [one.sampling_mask for one in made]
    ids = [len(mask.ids) / len(mask.counts) for mask in masks if isinstance(mask, SamplingMask)]
    yield Figure(section, "mask", 4 * (1 + sum(ids) / len(ids)), "bytes/token")


def weight_stall(shape: str) -> Iterator[Figure]:
    """Yield how long nothing is sampled while weights are updated under load."""
    with TemporaryDirectory(prefix="rmq-gpu-") as folder:
        model = Path(folder, "model")
        build_model(model, shape)
        updates = asyncio.run(_update_under_load(model, shape))
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    section = f"weight update under load, {shape}"
    yield from figures_of(section, updates)
    swap_s = median(update.swap_s for update in updates[1:])
    yield Figure(section, "weights loaded", size / 2**30 / swap_s, "GiB/s")


def colocated_update(shape: str) -> Iterator[Figure]:
    """Yield what an update costs where trainer and engine share a GPU, beside a copy on it."""
    section = f"weight update, trainer and engine on one GPU, {shape}"
    with TemporaryDirectory(prefix="rmq-gpu-") as name:
        taken = asyncio.run(_update_beside_the_trainer(Path(name), shape))
    best = {phase: min(seconds[phase] for seconds in taken) for phase in taken[0]}
    for phase, seconds in best.items():
        yield Figure(section, phase, seconds, "s")
    device = best.pop("copy on the device")
    yield Figure(section, "whole update", sum(best.values()), "s")
    yield Figure(section, "whole update / copy on the device", sum(best.values()) / device, "")


def throughput(shape: str) -> Iterator[Figure]:
    """Yield the tokens/s of vLLM alone and behind the queue."""
    with memory_server() as server:
        yield from through_the_queue(server, 32 if shape == "tiny" else 128, 2, SHAPES[shape])


@asynccontextmanager
async def _started(
    model: Path, memory_share: float | None = None, *, sampling_mask: bool = False
) -> AsyncIterator[Engine]:
    config = VllmConfig(
        max_model_len=512,
        max_num_seqs=SAMPLED,
        gpu_memory_utilization=memory_share,
        sampling_mask=sampling_mask,
    )
    engine = build_engine(config, model, FIRST_WEIGHTS)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


def _prompts(shape: str) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    size = SHAPES[shape].vocab_size or 90
    return [draw.integers(6, size, 32).astype("<i4") for _ in range(SAMPLED // MEMBERS)]


async def _sample(
    model: Path, prompts: Sequence[np.ndarray], params: SampleParams = PLAIN
) -> list[Generation]:
    async with _started(model, sampling_mask=bool(params.always_cuts())) as engine:
        return await asyncio.gather(
            *(
                engine.generate(f"{group_id('math', n)}/{m}", prompt, _seeded(params, n, m))
                for n, prompt in enumerate(prompts)
                for m in range(MEMBERS)
            )
        )


def _seeded(params: SampleParams, number: int, member: int) -> SampleParams:
    return structs.replace(params, seed=number * MEMBERS + member)


def _agreement(
    section: str,
    model: Path,
    prompts: Sequence[np.ndarray],
    made: Sequence[Generation],
    bound: float | None = MEAN_NATS,
) -> Iterator[Figure]:
    groups = [
        _group(number, prompt, made[number * MEMBERS : (number + 1) * MEMBERS])
        for number, prompt in enumerate(prompts)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy(model, LearnerConfig(token_budget=4_096), device=device)
    distances = [
        (policy.logprobs(part).cpu() - part.rollout_logprobs.cpu()).abs()
        for update in TrainController(policy).pack(groups).updates
        for part in update.batches
    ]
    all_of_them = torch.cat(distances)
    yield Figure(section, "mean distance", float(all_of_them.mean()), "nats", bound, "less")
    yield Figure(section, "largest distance", float(all_of_them.max()), "nats")


def _group(number: int, prompt: np.ndarray, made: Sequence[Generation]) -> RolloutGroup:
    states = []
    for index, generation in enumerate(made):
        state = RolloutState(index=index, prompt_ids=prompt, messages=[])
        mask = generation.sampling_mask
        spans = generation.spans
        state.append(generation.token_ids, generation.logprobs, spans, sampling_mask=mask)
        state.status = Status.COMPLETED
        state.finish_reason = generation.finish_reason
        state.reward = {"score": float(index % 2)}
        states.append(state)
    return RolloutGroup(group_id("math", number), "math", states)


async def _update_under_load(model: Path, shape: str) -> list[Update]:
    params = SampleParams(max_tokens=200, min_tokens=200)
    prompt = _prompts(shape)[0]
    async with _started(model) as engine:

        async def sample() -> list[Generation]:
            return await asyncio.gather(
                *(
                    engine.generate(f"{group_id('math', 0)}/{n}", prompt, _seeded(params, 0, n))
                    for n in range(SAMPLED)
                )
            )

        watched = WatchedUpdates(engine)
        return [await watched.update(model, sample) for _ in range(UPDATES)]


async def _update_beside_the_trainer(folder: Path, shape: str) -> list[dict[str, float]]:
    """Return the seconds of each phase, by update; the first one is left out."""
    model = folder / "model"
    build_model(model, shape)
    has_gpu = torch.cuda.is_available()
    trained = load_model(model, dtype=torch.bfloat16).to("cuda" if has_gpu else "cpu")
    buffers = HostBuffers()
    sender = FolderSender(folder / "published", keep=1)
    taken = []
    async with _started(model, COLOCATED_SHARE if has_gpu else None) as engine:
        for number in range(1, UPDATES + 2):
            seconds = await update(trained, buffers, sender, engine, PolicyVersion("l1", number))
            taken.append(seconds | {"copy on the device": _copy_s(trained)})
    return taken[1:]


def _copy_s(model: torch.nn.Module) -> float:
    """Return the seconds for a copy of all weights on their device."""
    began = time.perf_counter()
    copies = [value.clone() for value in model.state_dict().values()]
    if copies[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
