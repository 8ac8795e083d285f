"""The kinds of optimizer, and the names of their states: AdamW of torch, or 8-bit of bitsandbytes.

Not torchao's 8-bit AdamW, which can shard: safetensors cannot hold its tensor subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from buffer.errors import ConfigError
from buffer.imports import import_extra
from consumer.config.learner import LearnerConfig, OptimizerKind
from consumer.grpo.model_state.sharding import gather


def gradient_step(optimizer: torch.optim.Optimizer, max_norm: float) -> float | None:
    """Clip the gradient to `max_norm`, take the step, and return the norm before clipping.

    If the norm is not finite, change nothing and return None; sharded ranks then skip together.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    norm = float(gather(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
    if not math.isfinite(norm):
        return None
    optimizer.step()
    return norm


def mean_metrics(updates: Sequence[Mapping[str, float] | None], family: str) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it; None: a skipped update."""
    taken = [update for update in updates if update is not None]
    names = dict.fromkeys(name for update in taken for name in update)
    values = {name: [update[name] for update in taken if name in update] for name in names}
    means = {name: sum(column) / len(column) for name, column in values.items()}
    return means | {f"{family}/skipped_updates": float(len(updates) - len(taken))}


STATES: dict[OptimizerKind, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "adamw_8bit": ("step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"),
}  # parameters of under 4,096 values have float32 states, without qmap and absmax

SHARDED = ("exp_avg", "exp_avg_sq")  # states with the shape of their parameter


def make_optimizer(
    kind: OptimizerKind,
    parameters: Iterable[nn.Parameter],
    *,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    ranks: int = 1,
) -> torch.optim.Optimizer:
    """Return an optimizer whose weight decay leaves norms and biases, as all vectors, alone."""
    every = list(parameters)
    matrices = {"params": [each for each in every if each.ndim > 1], "weight_decay": weight_decay}
    vectors = {"params": [each for each in every if each.ndim < 2], "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [group for group in (matrices, vectors) if group["params"]]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
    if ranks > 1:
        raise ConfigError(
            f"[learner] optimizer = adamw_8bit cannot run on {ranks} ranks: bitsandbytes cannot "
            "update sharded weights",
            hint="optimizer = adamw: its state is divided over the ranks; or use one rank",
        )
    optim = import_extra("bitsandbytes.optim", "[learner] optimizer = adamw_8bit")
    optimizer: torch.optim.Optimizer = optim.AdamW8bit(groups, lr=rate, betas=betas)
    return optimizer


def scheduled_rate(config: LearnerConfig, step: int) -> float:
    """Return the learning rate at the optimizer step `step`, counted from 0.

    The schedule is in train steps, each of `updates_per_batch` optimizer steps; checkpoints hold no
    state of it.
    """
    warmup = config.warmup_steps * config.updates_per_batch
    rate = config.learning_rate
    if step < warmup:
        return rate * (step + 1) / warmup
    if config.decay_steps is None:
        return rate
    length = config.decay_steps * config.updates_per_batch - warmup
    left = max(0.0, 1.0 - (step - warmup) / length)
    if config.schedule == "cosine":
        left = (1.0 - math.cos(math.pi * left)) / 2
    return rate * (config.final_rate + (1.0 - config.final_rate) * left)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adamw_8bit"
