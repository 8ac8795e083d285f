"""Off-policy correction: rollouts were sampled by older weights, and by an engine whose numbers differ.

The weight of a token is w = old policy / rollout, a number without gradient, over one of
    token      w_t                            (truncated: TIS, Ionides 2008; AReaL's decoupled PPO, arXiv:2505.24298)
    sequence   the product of a sample's w_t   (unbiased, and of a variance that grows with the length)
    geometric  its root of the length          (a sequence ratio of bounded variance, as in GSPO, arXiv:2507.18071)
and is bounded one of two ways: `truncate` caps it, `mask` drops what lies outside [floor, cap] (IcePop, rejection
sampling). `veto` drops whole samples that hold a token which the old policy finds next to impossible. Dropped tokens
stay in the divisor of the loss: what one micro-batch drops must not change the weight of another's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.learner_config import LossConfig

LARGEST_LOG = 20.0
"""Log-ratios are clamped to this before they are raised: e^20 is 5e8, beyond any bound."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Which tokens belong together. `sample` int64[N]: index into `trained_tokens` float32[S], each a sum of `mask`."""

    mask: Tensor
    sample: Tensor
    trained_tokens: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Sums of float32[N] over the trained tokens of each sample, float32[S]."""
        trained = torch.where(self.mask > 0, values, 0.0)
        return torch.zeros_like(self.trained_tokens).index_add(0, self.sample, trained)

    def mean(self, values: Tensor) -> Tensor:
        """Means of float32[N] over the trained tokens of each sample, float32[S]; 0 where there are none."""
        return self.sum(values) / self.trained_tokens.clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """`weights` float32[N] multiply the loss of a token, 0 where it was dropped; `dropped` bool[N]."""

    weights: Tensor
    dropped: Tensor


@torch.no_grad()
def correct(old_logprobs: Tensor, rollout_logprobs: Tensor, samples: Samples, config: LossConfig) -> Correction:
    """The correction that `config` asks for; all ones, nothing dropped, without `importance_cap`."""
    if config.importance_cap is None:
        return Correction(torch.ones_like(old_logprobs), torch.zeros_like(old_logprobs, dtype=torch.bool))
    log_ratio = old_logprobs - rollout_logprobs
    weights = _at_level(log_ratio, samples, config).clamp(-LARGEST_LOG, LARGEST_LOG).exp()
    dropped = torch.zeros_like(weights, dtype=torch.bool)
    if config.importance_mode == "mask":
        dropped = (weights > config.importance_cap) | (weights < config.importance_floor)
    if config.importance_veto is not None:
        impossible = (log_ratio.exp() < config.importance_veto).to(weights.dtype)
        dropped = dropped | (samples.sum(impossible)[samples.sample] > 0)
    return Correction(torch.where(dropped, 0.0, weights.clamp(max=config.importance_cap)), dropped)


def _at_level(log_ratio: Tensor, samples: Samples, config: LossConfig) -> Tensor:
    if config.importance_level == "token":
        return log_ratio
    of_sample = samples.sum(log_ratio) if config.importance_level == "sequence" else samples.mean(log_ratio)
    return of_sample[samples.sample]
