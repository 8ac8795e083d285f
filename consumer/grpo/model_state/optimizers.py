"""The kinds of optimizer, and the names of their states: AdamW of torch, or 8-bit of bitsandbytes.

Of torchao's 8-bit AdamW, which can shard, states are tensor subclasses that safetensors cannot
hold; those of bitsandbytes are plain tensors, and cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from buffer.errors import ConfigError
from buffer.model.extras import missing_extra
from consumer.config.learner import OptimizerKind

STATES: dict[OptimizerKind, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "adamw_8bit": ("step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"),
}
"""Names of an optimizer's states. Parameters of under 4,096 values have no qmap and absmax: their
states are float32."""

SHARDED = ("exp_avg", "exp_avg_sq")
"""The states that have the shape of their parameter where it is sharded."""


def make_optimizer(
    kind: OptimizerKind,
    parameters: Iterable[nn.Parameter],
    *,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    ranks: int = 1,
) -> torch.optim.Optimizer:
    """Return an optimizer of this kind. Raises ConfigError where it cannot run."""
    if kind == "adamw":
        return torch.optim.AdamW(
            parameters, lr=rate, betas=betas, weight_decay=weight_decay, fused=True
        )
    if ranks > 1:
        raise ConfigError(
            f"[learner] optimizer = adamw_8bit cannot run on {ranks} ranks: bitsandbytes cannot "
            "update sharded weights",
            hint="optimizer = adamw: its state is divided over the ranks; or use one rank",
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise missing_extra(error) or error from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        parameters, lr=rate, betas=betas, weight_decay=weight_decay
    )
    return optimizer


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Return the kind of an optimizer that `make_optimizer` made."""
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adamw_8bit"
