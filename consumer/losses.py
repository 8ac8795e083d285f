"""Policy-gradient losses on flat token columns.

Shapes: N response tokens of a micro-batch, S samples. Nothing here knows about models or packing. The weight
of a token in the loss is fixed for the whole batch before it is split (`token_weights`), so that the gradient
does not depend on how the batch was cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.learner_config import LossConfig


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """What the loss reads, each float32[N]. Only `logprobs`, and `entropy` where the loss has it, carry a gradient."""

    logprobs: Tensor  # of the policy that is trained
    old_logprobs: Tensor  # of the policy that the ratio is clipped against
    rollout_logprobs: Tensor  # as the engine reported them
    advantages: Tensor  # of the token's sample
    mask: Tensor  # 1 = trained
    entropy: Tensor
    ref_logprobs: Tensor | None = None


def policy_loss(columns: TokenColumns, weights: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (a scalar to be summed over micro-batches) and metrics (sums over trained tokens, detached).

    Per token, with r = exp(logprob - old logprob):
        -A * min(r, clip(r, 1 - clip_low, 1 + clip_high)) for A > 0, with max for A < 0
        (PPO, Schulman et al. 2017, arXiv:1707.06347; two bounds: DAPO, Yu et al. 2025, arXiv:2503.14476),
    times the truncated weight min(exp(old - rollout), importance_cap), through which no gradient flows
        (AReaL's decoupled objective, Fu et al. 2025, arXiv:2505.24298; truncated as in IMPALA,
        arXiv:1802.01561),
    plus kl_coef * KL(policy, reference), minus entropy_coef * entropy. `weights` float32[N] are those of
    `token_weights`.
    """
    ratio = (columns.logprobs - columns.old_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = -torch.minimum(ratio * columns.advantages, clipped * columns.advantages)
    importance = importance_weights(columns.old_logprobs, columns.rollout_logprobs, config.importance_cap)
    token_loss = importance * surrogate - config.entropy_coef * columns.entropy
    if columns.ref_logprobs is not None:
        token_loss = token_loss + config.kl_coef * kl_k3(columns.logprobs, columns.ref_logprobs)
    # where, not a product: a masked token may hold an infinite logprob, and 0 * inf is nan.
    loss = torch.where(columns.mask > 0, weights * token_loss, 0.0).sum()
    return loss, _metrics(columns, ratio, clipped, importance, surrogate)


def token_weights(
    mask: Tensor,
    sample: Tensor,
    trained_tokens: Tensor,
    config: LossConfig,
    *,
    batch_tokens: float,
    batch_samples: int,
) -> Tensor:
    """The weight of each token in the batch's loss, float32[N].

    `mask` float32[N]; `sample` int64[N]: which of the S samples a token belongs to; `trained_tokens`
    float32[S]; `batch_tokens` and `batch_samples` count the whole batch. The weights add up to 1 over the
    batch for token_mean (arXiv:2503.14476) and, where no sample is empty, for sequence_mean
    (arXiv:2402.03300); fixed_length divides each sample's sum by `max_tokens` instead of its own length
    (Dr. GRPO, arXiv:2503.20783).
    """
    if config.aggregation == "token_mean":
        return mask / max(batch_tokens, 1.0)
    if config.aggregation == "sequence_mean":
        return mask / (trained_tokens.clamp(min=1.0)[sample] * batch_samples)
    return mask / (float(config.max_tokens or 1) * batch_samples)


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float | None) -> Tensor:
    """`min(exp(old - rollout), cap)`, detached, float32[N]; all ones without a cap.

    Corrects for rollouts by older weights, or by an engine whose numbers differ from the trainer's. The cap
    bounds the variance (truncated importance sampling, Ionides 2008, J. Comput. Graph. Stat. 17(2)).
    """
    if cap is None:
        return torch.ones_like(old_logprobs)
    return (old_logprobs - rollout_logprobs).exp().clamp(max=cap).detach()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate `exp(d) - d - 1` of KL(policy, reference), d = ref - logprob; float32[N], never negative.

    (Schulman 2020, "Approximating KL divergence", k3; used so in GRPO, arXiv:2402.03300, equation 4.)
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def _metrics(
    columns: TokenColumns, ratio: Tensor, clipped: Tensor, importance: Tensor, surrogate: Tensor
) -> dict[str, Tensor]:
    advantages = columns.advantages
    values: Mapping[str, Tensor] = {
        "loss/surrogate": importance * surrogate,
        "policy/entropy": columns.entropy,
        "policy/ratio": ratio,
        "policy/kl_old": kl_k3(columns.logprobs, columns.old_logprobs),
        "policy/clip_fraction": (ratio * advantages > clipped * advantages).float(),
        "mismatch/importance": importance,
        "mismatch/abs_logprob": (columns.logprobs - columns.rollout_logprobs).abs(),
        "mismatch/kl": kl_k3(columns.logprobs, columns.rollout_logprobs),
    }
    if columns.ref_logprobs is not None:
        values = {**values, "policy/kl_ref": kl_k3(columns.logprobs, columns.ref_logprobs)}
    return {name: torch.where(columns.mask > 0, v, 0.0).sum().detach() for name, v in values.items()}
