"""Off-policy correction: rollouts were sampled by older weights, in an engine with other numerics.

The weight of a token is w = old policy / rollout policy, a number without gradient, of
    token      the token itself                   (truncated: TIS, Ionides 2008; AReaL's decoupled
                                                  PPO, arXiv:2505.24298)
    sequence   the product over a sample's tokens (unbiased; its variance grows with the length)
    geometric  the geometric mean of these        (bounded variance, as in GSPO, arXiv:2507.18071)
`truncate` caps it, `mask` drops what is outside [floor, cap] (IcePop), and `veto` drops samples
with a nearly impossible token. Dropped tokens stay in the divisor of the loss: one micro-batch must
not change the weights of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.config.learner import LossConfig

MAX_LOG_RATIO = 20.0  # e^20 is 5e8, above any useful bound


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class Samples:
    """Which tokens belong to the same sample.

    `mask`: float32[N], 1 where a token is trained. `sample`: int64[N], index into `trained_tokens`,
    float32[S]: the sum of `mask` over each sample.
    """

    mask: Tensor
    sample: Tensor
    trained_tokens: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Sum float32[N] over the trained tokens of each sample; return float32[S]."""
        trained = torch.where(self.mask > 0, values, 0.0)
        return torch.zeros_like(self.trained_tokens).index_add(0, self.sample, trained)

    def mean(self, values: Tensor) -> Tensor:
        """Average float32[N] over the trained tokens of each sample, float32[S]; 0 over none."""
        return self.sum(values) / self.trained_tokens.clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """The correction's `weights` of the loss, float32[N], 0 where `dropped`, bool[N]."""

    weights: Tensor
    dropped: Tensor


@torch.no_grad()
def correct(
    old_logprobs: Tensor, rollout_logprobs: Tensor, samples: Samples, config: LossConfig
) -> Correction:
    """Return the correction that `config` describes, from log-probabilities float32[N].

    Without `importance_cap` all weights are 1 and no token is dropped.
    """
    if config.importance_cap is None:
        return Correction(
            torch.ones_like(old_logprobs), torch.zeros_like(old_logprobs, dtype=torch.bool)
        )
    log_ratio = old_logprobs - rollout_logprobs
    level = _at_level(log_ratio, samples, config)
    weights = clamped(level).exp()
    dropped = torch.zeros_like(weights, dtype=torch.bool)
    if config.importance_mode == "mask":
        dropped = (weights > config.importance_cap) | (weights < config.importance_floor)
    if config.importance_veto is not None:
        impossible = (log_ratio < math.log(config.importance_veto)).to(weights.dtype)
        dropped = dropped | (samples.sum(impossible)[samples.sample] > 0)
    capped = weights.clamp(max=config.importance_cap)
    return Correction(torch.where(dropped, 0.0, capped), dropped)


def _at_level(log_ratio: Tensor, samples: Samples, config: LossConfig) -> Tensor:
    """Return the log-ratio of each token's unit (token, sequence, geometric mean), float32[N]."""
    match config.importance_level:
        case "token":
            return log_ratio
        case "sequence":
            return samples.sum(log_ratio)[samples.sample]
    return samples.mean(log_ratio)[samples.sample]
