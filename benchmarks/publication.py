"""`python -m benchmarks.publication [GB] [ROUNDS]`: what it costs to publish a model of that size.

Random bf16 weights go from a model in the trainer to one in an engine (transformers), through a
folder. The best of several rounds in turns: the trainer's critical path against a copy in memory,
and the whole way against writing and reading the bytes once. Each write follows the deletion of as
many bytes: a page that was free for seconds costs a virtual machine several times the write. Needs
five times GB of memory.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.figure import Figure
from benchmarks.report import print_table
from buffer.weights import folder_manifest as manifest
from buffer.weights.safetensors_files import weight_files
from buffer.weights.shared_folder import FolderSender
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion
from consumer.grpo.model_state.weights_folder import HostBuffers, snapshot_weights
from consumer.grpo.models.model_folder import copy_tokenizer, load_model
from consumer.handle.ranks import ALONE
from producer_workers.config.engine import TransformersConfig
from producer_workers.engines.base import Engine
from producer_workers.engines.hf.engine import TransformersEngine
from rolloutmq.config.small_model import TinyModelConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model

BLOCK_BYTES = 8 << 20

LAYER_PARAMETERS = 33_558_528
"""of a layer as below"""


def main(gigabytes: float, rounds: int) -> None:
    layers = max(1, round(gigabytes * 1e9 / 2 / LAYER_PARAMETERS))
    spec = TinyModelConfig(
        hidden=2048, layers=layers, heads=16, kv_heads=4, head_dim=128, intermediate=3755
    )
    with TemporaryDirectory(prefix="rmq-bench-") as name:
        print_table(list(asyncio.run(_measure(Path(name), spec, rounds))))


async def _measure(folder: Path, spec: TinyModelConfig, rounds: int) -> Iterator[Figure]:
    first = folder / "first"
    build_tiny_model(first, spec, 0)
    model = load_model(first, dtype=torch.bfloat16)
    copy_tokenizer(first, folder)
    buffers = HostBuffers()
    snapshot = snapshot_weights(model, ALONE, buffers)
    shutil.rmtree(first)
    first.mkdir()
    snapshot.write(first)
    copy_tokenizer(folder, first)
    engine = TransformersEngine(TransformersConfig(dtype="bfloat16"), first, FIRST_WEIGHTS)
    await engine.start()
    sender = FolderSender(folder / "published", keep=1)
    plain = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    taken: list[dict[str, float]] = []
    for number in range(rounds + 1):
        seconds: dict[str, float] = {}
        clock = _clock(seconds)
        clock("copy", _copy, model.state_dict(), plain)
        written = folder / "plain"
        written.unlink(missing_ok=True)
        clock("plain write", _write, written, plain)
        clock("plain read", _read, written)
        version = PolicyVersion("l1", number)
        taken.append(seconds | await update(model, buffers, sender, engine, version))
    size = sum(file.stat().st_size for file in weight_files(first))
    await engine.shutdown()
    return _figures(size, taken[1:])


async def update(
    model: PreTrainedModel,
    buffers: HostBuffers,
    sender: FolderSender,
    engine: Engine,
    version: PolicyVersion,
) -> dict[str, float]:
    """Bring the weights of `model` into `engine`, through a folder; return the seconds by phase."""
    if sender.folder.exists():
        sender.prune()
    seconds: dict[str, float] = {}
    clock = _clock(seconds)
    snapshot = clock("snapshot", snapshot_weights, model, ALONE, buffers)
    published = clock("write", sender.write, version, snapshot.write)
    path = Path(published.address)
    clock("fetch", manifest.verify, path, published.checksum)
    began = time.perf_counter()
    await engine.load_weights(path, version)
    seconds["swap"] = time.perf_counter() - began
    return seconds


def _clock(seconds: dict[str, float]) -> Callable[..., Any]:
    def clock(name: str, work: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        result = work(*args)
        seconds[name] = time.perf_counter() - began
        return result

    return clock


def _copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _read(file: Path) -> None:
    block = bytearray(BLOCK_BYTES)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(block):
            pass


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with file.open("wb") as stream:
        for tensor in tensors.values():
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _figures(size: int, taken: list[dict[str, float]]) -> Iterator[Figure]:
    section = f"publication of {size / 1e9:.1f} GB, bf16"
    best = {name: min(seconds[name] for seconds in taken) for name in taken[0]}
    for name in taken[0]:
        yield Figure(section, name, best[name], "s")
    critical = best["snapshot"] / best["copy"]
    yield Figure(section, "critical path / copy", critical, "", 1.1, "less")
    after = sum(best[name] for name in ("write", "fetch", "swap"))
    plain = best["plain write"] + best["plain read"]
    yield Figure(section, "after the copy / write and read", after / plain, "", 1.2, "less")
    whole = (best["snapshot"] + after) / plain
    yield Figure(section, "whole way / write and read", whole, "", 1.2, "less")


if __name__ == "__main__":
    main(float((sys.argv[1:] or ["2"])[0]), int((sys.argv[2:] or ["3"])[0]))
