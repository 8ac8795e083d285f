"""Optimizer steps, which are skipped where the gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from consumer.grpo.model_state.sharding import gather


def gradient_step(optimizer: torch.optim.Optimizer, max_norm: float) -> float | None:
    """Clip the gradient to `max_norm`, take the step, and return the norm before clipping.

    Where the norm is not finite, change nothing and return None: the step would make every weight
    nan. With sharded weights all ranks get the same norm, and skip together.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    norm = float(gather(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
    if not math.isfinite(norm):
        return None
    optimizer.step()
    return norm


def mean_metrics(updates: Sequence[Mapping[str, float] | None], family: str) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it, and how many were skipped.

    None stands for an update that was skipped; an update without a trained token has fewer metrics
    than the others.
    """
    taken = [update for update in updates if update is not None]
    names = dict.fromkeys(name for update in taken for name in update)
    values = {name: [update[name] for update in taken if name in update] for name in names}
    means = {name: sum(column) / len(column) for name, column in values.items()}
    return means | {f"{family}/skipped_updates": float(len(updates) - len(taken))}
