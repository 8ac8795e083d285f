"""Train steps of one model: tokens/s, the share of the GPU's peak (MFU), and peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.figure import Figure
from benchmarks.gpu_day.rollouts import random_groups
from benchmarks.gpu_day.shapes import SHAPES, build_model
from buffer.errors import ConfigError
from buffer.wire.group import RolloutGroup
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy import vocabulary_projection
from consumer.grpo.policy.policy import Policy

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 operations per second, by a part of the device's name."""

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "sdpa": {"attn_implementation": "sdpa"},
    "full logits": {},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"compile": True},
    "8-bit AdamW": {"optimizer": "adamw_8bit"},
}
"""Settings of [learner] that are compared; "full logits" changes the chunks of the projection."""

STEPS = 3
"""Steps of each variant; the first, a warm-up, is not counted."""


def train_steps(shape: str) -> Iterator[Figure]:
    """Yield the figures of all variants of one model."""
    with TemporaryDirectory(prefix="rmq-gpu-") as folder:
        model = Path(folder, "model")
        build_model(model, shape)
        for name, settings in VARIANTS.items():
            yield from _variant(shape, name, settings, model)


def _variant(shape: str, name: str, settings: dict[str, Any], model: Path) -> Iterator[Figure]:
    chunk_bytes = vocabulary_projection.CHUNK_BYTES
    if name == "full logits":
        vocabulary_projection.CHUNK_BYTES = 1 << 50
    section = f"train step, {shape}, {name}"
    try:
        seconds, tokens, flops = _measure(shape, settings, model)
    except torch.OutOfMemoryError:
        yield Figure(section, "fits in memory", 0, "", 1 if name == "default" else None)
        return
    except ConfigError as error:
        print(f"{section}: left out: {error}")
        return
    finally:
        vocabulary_projection.CHUNK_BYTES = chunk_bytes
        gc.collect()
    yield Figure(section, "trained", tokens / seconds, "tokens/s")
    if torch.cuda.is_available():
        if peak := _peak_flops():
            yield Figure(section, "MFU", 100 * flops / seconds / peak, "%")
        yield Figure(section, "peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def _measure(shape: str, settings: dict[str, Any], model: Path) -> tuple[float, int, float]:
    """Return the seconds of the fastest step, its tokens, and its floating-point operations."""
    on_gpu = torch.cuda.is_available()
    config = LearnerConfig(token_budget=16_384 if on_gpu else 2_048, **settings)
    policy = Policy(model, config, device="cuda" if on_gpu else "cpu")
    controller = TrainController(policy, "grpo")
    prompt, response = (512, 1_536) if on_gpu else (8, 16)
    groups = random_groups(16 if on_gpu else 2, prompt, response, _vocabulary(policy))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [_step(controller, groups) for _ in range(STEPS)]
    lengths = [prompt + int(length) for group in groups for length in group.lengths]
    return min(seconds[1:]), sum(lengths), _flops(shape, policy, lengths)


def _step(controller: TrainController, groups: Sequence[RolloutGroup]) -> float:
    began = time.perf_counter()
    controller.fit(groups)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _vocabulary(policy: Policy) -> int:
    return int(policy.model.get_input_embeddings().weight.shape[0])


def _flops(shape: str, policy: Policy, lengths: Sequence[int]) -> float:
    """Return the operations of forward and backward pass: 6 per weight and token, and attention."""
    spec = SHAPES[shape]
    weights = sum(parameter.numel() for parameter in policy.parameters.values())
    attention = 6 * spec.layers * spec.heads * spec.head_dim * sum(n * n for n in lengths)
    return 6.0 * weights * sum(lengths) + attention


def _peak_flops() -> float | None:
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
