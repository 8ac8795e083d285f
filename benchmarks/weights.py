"""Measure what a version of weights costs, from the learner's files to a vLLM engine, by each way.

The trainer's part is `write`; the worker's is all that lies between the announcement of a version
and its use: fetched, checked, loaded. The publication itself, one call of a
script, is the same for all and left out. In turns, in one process and one engine per model.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.figure import Figure, ratio
from benchmarks.server import BenchServer
from buffer.control.control import ControlState, Mode
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.run.run import Run
from buffer.weights.copies import CopySender
from buffer.weights.redis_chunks import VersionStore
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import WeightsSender
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion
from consumer.grpo.models.model_folder import copy_tokenizer, load_model
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine
from producer_workers.worker.inbox import Inbox
from producer_workers.worker.weight_updates import WeightUpdates
from rolloutmq.config.small_model import TinyModelConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model

MODELS = {
    "tiny model": TinyModelConfig(max_positions=512),
    "200 MB": TinyModelConfig(
        hidden=512, layers=14, heads=8, kv_heads=8, head_dim=64, intermediate=1536
    ),
}


def weights(server: BenchServer, rounds: int) -> Iterator[Figure]:
    """Milliseconds per version, medians over `rounds`; nothing where no round is asked for."""
    for name, config in MODELS.items() if rounds else ():
        with TemporaryDirectory(prefix="rmq-bench-") as folder, asyncio.Runner() as runner:
            taken, size = runner.run(_compare(server, config, Path(folder), rounds))
            yield from _figures(f"weights to vLLM, {name} ({size / 1e6:.0f} MB)", taken)


async def _compare(
    server: BenchServer, config: TinyModelConfig, folder: Path, rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Return seconds of trainer and worker, by way and round, and the bytes of a version."""
    model = folder / "model"
    build_tiny_model(model, config, 0)
    save = _learner(model)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    run = Run.create(
        server.store,
        "weights",
        new_nonce(),
        RunLimits(tasks={"math": TaskLimits()}),
        FIRST_WEIGHTS,
        "",
    )
    ways: dict[str, WeightsSender] = {
        "folder": FolderSender(folder / "shared", keep=1),
        "Redis": CopySender(VersionStore(run.store, run.keys), folder, keep=1),
    }
    engine = build_engine(
        VllmConfig(max_model_len=256, max_num_seqs=8, omp_threads=1), model, FIRST_WEIGHTS
    )
    await engine.start()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    try:
        for number in range(1, rounds + 2):
            for name, way in ways.items():
                inbox = Inbox()
                inbox.open()
                controlled = WeightUpdates(run, engine, inbox)
                seconds = await _update(
                    controlled, inbox, way, PolicyVersion(name.lower(), number), save
                )
                await controlled.close()
                if number > 1:  # the first warms up
                    taken[name].append(seconds)
    finally:
        await engine.shutdown()
        for way in ways.values():
            way.close()
        server.clear()
    return taken, size


async def _update(
    controlled: WeightUpdates,
    inbox: Inbox,
    way: WeightsSender,
    version: PolicyVersion,
    save: Callable[[Path], None],
) -> tuple[float, float]:
    began = time.perf_counter()
    path, checksum = way.write(version, save)
    written = time.perf_counter()
    state = ControlState(1, Mode.RUN, (), version, path, checksum)
    while not await controlled.update(state):
        if controlled.refusal:
            raise RuntimeError(f"the engine refused {path}: {controlled.refusal}")
        await inbox.read(math.inf)
    loaded = time.perf_counter()
    way.prune()
    return written - began, loaded - written


def _learner(folder: Path) -> Callable[[Path], None]:
    """Save a model that changes with every version, as the learner does."""
    model = load_model(folder)

    def save(path: Path) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(1.001)
        model.save_pretrained(path)
        copy_tokenizer(folder, path)

    return save


def _figures(section: str, taken: dict[str, list[tuple[float, float]]]) -> Iterator[Figure]:
    for name, rounds in taken.items():
        yield Figure(section, f"{name}: trainer", 1000 * median(wrote for wrote, _ in rounds), "ms")
        yield Figure(section, f"{name}: worker", 1000 * median(took for _, took in rounds), "ms")
    sums = {name: [sum(both) for both in rounds] for name, rounds in taken.items()}
    yield Figure(section, "folder / Redis, both together: time", ratio(sums, "Redis", "folder"), "")
