"""Policy-gradient losses on flat token columns.

Shapes: N response tokens of a micro-batch, S samples. Nothing here knows about models or packing. The weight
of a token in the loss is fixed for the whole batch before it is split (`token_weights`), so that the gradient
does not depend on how the batch was cut into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.importance import Correction, Samples, correct
from consumer.kl import kl_estimate
from consumer.learner_config import LossConfig


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """What the loss reads, each float32[N]. Only `logprobs`, and `entropy` where the loss has it, carry a gradient."""

    logprobs: Tensor  # of the policy that is trained
    old_logprobs: Tensor  # of the policy that the ratio is clipped against
    rollout_logprobs: Tensor  # as the engine reported them
    advantages: Tensor  # of the token's sample
    samples: Samples  # which tokens are trained, and which belong together
    entropy: Tensor
    ref_logprobs: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        return self.samples.mask


def policy_loss(columns: TokenColumns, weights: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (a scalar to be summed over micro-batches) and metrics (sums over trained tokens, detached).

    Per token: the objective, times the correction of `consumer.importance`, plus kl_coef * KL(policy, reference),
    minus entropy_coef * entropy. `weights` float32[N] are those of `token_weights`.
    """
    surrogate = _OBJECTIVES[config.objective](columns, config)
    correction = correct(columns.old_logprobs, columns.rollout_logprobs, columns.samples, config)
    token_loss = correction.weights * surrogate.loss - config.entropy_coef * columns.entropy
    if columns.ref_logprobs is not None:
        token_loss = token_loss + config.kl_coef * kl_estimate(config.kl_kind, columns.logprobs, columns.ref_logprobs)
    # where, not a product: a masked token may hold an infinite logprob, and 0 * inf is nan.
    loss = torch.where(columns.mask > 0, weights * token_loss, 0.0).sum()
    return loss, _metrics(columns, surrogate, correction)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What an objective makes of the tokens, each float32[N]: `clipped` is 1 where the bound took effect."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with r = exp(logprob - old logprob).

    (PPO, Schulman et al. 2017, arXiv:1707.06347; two bounds: DAPO, Yu et al. 2025, arXiv:2503.14476.) With
    `dual_clip` c, at most `-c A` where A < 0 (Ye et al. 2020, arXiv:1912.09729, equation 5).
    """
    ratio = (columns.logprobs - columns.old_logprobs).exp()
    return _clipped(ratio, columns.advantages, config)


def gspo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """PPO's objective with one ratio per sample, the geometric mean of its tokens' ratios.

    (GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7; with aggregation sequence_mean it is theirs. Their
    bounds are much closer to 1: 3e-4 and 4e-4.)
    """
    log_ratio = columns.samples.mean(columns.logprobs - columns.old_logprobs)
    return _clipped(log_ratio.exp()[columns.samples.sample], columns.advantages, config)


def cispo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """`-sg(clip(r)) A logprob`: REINFORCE with a clipped weight, so that no token loses its gradient.

    (CISPO, MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5, where only the upper bound is used: clip_low = 1.)
    """
    ratio = (columns.logprobs - columns.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return Surrogate(-weight * columns.advantages * columns.logprobs, ratio, (weight != ratio).float())


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ratio * advantages > bounded * advantages
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        too_low = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(too_low, floor, gain), clipped | too_low
    return Surrogate(-gain, ratio, clipped.float())


_OBJECTIVES: Mapping[str, Callable[[TokenColumns, LossConfig], Surrogate]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def token_weights(samples: Samples, config: LossConfig, *, batch_tokens: float, batch_samples: int) -> Tensor:
    """The weight of each token in the batch's loss, float32[N].

    `batch_tokens` and `batch_samples` count the whole batch. The weights add up to 1 over the batch for token_mean
    (arXiv:2503.14476) and, where no sample is empty, for sequence_mean (arXiv:2402.03300); fixed_length
    divides each sample's sum by `max_tokens` instead of its own length (Dr. GRPO, arXiv:2503.20783).
    """
    if config.aggregation == "token_mean":
        return samples.mask / max(batch_tokens, 1.0)
    if config.aggregation == "sequence_mean":
        return samples.mask / (samples.trained_tokens.clamp(min=1.0)[samples.sample] * batch_samples)
    return samples.mask / (float(config.max_tokens or 1) * batch_samples)


def _metrics(columns: TokenColumns, surrogate: Surrogate, correction: Correction) -> dict[str, Tensor]:
    values: Mapping[str, Tensor] = {
        "loss/surrogate": correction.weights * surrogate.loss,
        "policy/entropy": columns.entropy,
        "policy/ratio": surrogate.ratio,
        "policy/kl_old": kl_estimate("k3", columns.logprobs, columns.old_logprobs),
        "policy/clip_fraction": surrogate.clipped,
        "mismatch/importance": correction.weights,
        "mismatch/importance_square": correction.weights.square(),
        "mismatch/dropped_fraction": correction.dropped.float(),
        "mismatch/abs_logprob": (columns.logprobs - columns.rollout_logprobs).abs(),
        "mismatch/kl": kl_estimate("k3", columns.logprobs, columns.rollout_logprobs),
        "mismatch/log_ppl": -columns.logprobs,
        "mismatch/rollout_log_ppl": -columns.rollout_logprobs,
    }
    if columns.ref_logprobs is not None:
        values = {**values, "policy/kl_ref": kl_estimate("k3", columns.logprobs, columns.ref_logprobs)}
    return {name: torch.where(columns.mask > 0, v, 0.0).sum().detach() for name, v in values.items()}


def derived_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """What follows from means over trained tokens, with the means that only served for it taken out.

    mismatch/ess: effective share of the tokens under the correction's weights, (sum w)^2 / (n sum w^2) (Kish 1965);
    mismatch/ppl, rollout_ppl: perplexity of the response under the trainer and as sampled; mismatch/ppl_ratio of them.
    """
    if "mismatch/importance" not in means:
        return dict(means)
    rest = dict(means)
    square, trainer, rollout = (rest.pop(f"mismatch/{n}") for n in ("importance_square", "log_ppl", "rollout_log_ppl"))
    return rest | {
        "mismatch/ess": rest["mismatch/importance"] ** 2 / square if square else 0.0,
        "mismatch/ppl": math.exp(min(trainer, 80.0)),
        "mismatch/rollout_ppl": math.exp(min(rollout, 80.0)),
        "mismatch/ppl_ratio": math.exp(max(-80.0, min(trainer - rollout, 80.0))),
    }
