"""Policy-gradient losses on flat columns of tokens.

Shapes: N response tokens of a micro-batch, S samples. Nothing here depends on models or packing.
The weight of a token in the loss is determined for the whole batch before it is divided into
micro-batches (`token_weights`), so the gradient does not depend on that division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.config.learner import KlKind, LossConfig
from consumer.grpo.learner.importance import Correction, Samples, clamped, correct

MAX_LOG_PPL = 80.0
"""Log-perplexities are clamped to this before exponentiation: e^80 still fits into a float32."""


def kl_estimate(kind: KlKind, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy, reference) per token, from the logprobs of the sampled tokens alone.

    float32[N] from float32[N]; it carries the gradient of `logprobs`. With d = logprob - reference
    (Schulman 2020, "Approximating KL divergence"):
        abs  |d|                not an estimate of KL; a robust distance
        k2   d^2 / 2            biased, but its mean gradient is that of the KL
        k3   exp(-d) - 1 + d    unbiased, never negative (GRPO, arXiv:2402.03300, equation 4)
    k1, which is d, is not offered: the mean of its gradient is 0, so it would only add noise.
    """
    difference = clamped(logprobs - ref_logprobs)
    match kind:
        case "abs":
            return difference.abs()
        case "k2":
            return difference.square() / 2
    return (-difference).exp() - 1 + difference


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Hold the inputs of the loss, each float32[N].

    Only `logprobs`, and `entropy` where the loss has an entropy term, carry a gradient.

        loss, metrics = policy_loss(TokenColumns(...), weights, LossConfig())
    """

    logprobs: Tensor  # under the policy that is trained
    old_logprobs: Tensor  # under the policy that the ratio is clipped against
    rollout_logprobs: Tensor  # as the engine reported them
    advantages: Tensor  # of the token's sample
    samples: Samples  # which tokens are trained, and which belong to the same sample
    entropy: Tensor
    ref_logprobs: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """Return float32[N]: 1 where a token is trained."""
        return self.samples.mask

    def without_masked(self) -> TokenColumns:
        """Return the columns with 0 for every token that is not trained.

        The loss then has no gradient from these tokens, even where a value is infinite. A mask on
        the loss does not achieve this: backward multiplies its 0 by a derivative that may be
        infinite.
        """
        trained = self.mask > 0

        def zeroed(column: Tensor) -> Tensor:
            return torch.where(trained, column, 0.0)

        return TokenColumns(
            logprobs=zeroed(self.logprobs),
            old_logprobs=zeroed(self.old_logprobs),
            rollout_logprobs=zeroed(self.rollout_logprobs),
            advantages=zeroed(self.advantages),
            samples=self.samples,
            entropy=zeroed(self.entropy),
            ref_logprobs=None if self.ref_logprobs is None else zeroed(self.ref_logprobs),
        )


def policy_loss(
    columns: TokenColumns, weights: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch and its metrics.

    The loss is a scalar to be summed over micro-batches; metrics are sums over trained tokens,
    detached. Per token: the objective, times the correction of `importance.py`, plus
    kl_coef * KL(policy, reference), minus entropy_coef * entropy; nothing of these for a token that
    the correction drops. `weights`: float32[N] from `token_weights`.
    """
    columns = columns.without_masked()
    surrogate = _OBJECTIVES[config.objective](columns, config)
    correction = correct(columns.old_logprobs, columns.rollout_logprobs, columns.samples, config)
    token_loss = correction.weights * surrogate.loss - config.entropy_coef * columns.entropy
    if columns.ref_logprobs is not None:
        kl = kl_estimate(config.kl_kind, columns.logprobs, columns.ref_logprobs)
        token_loss = token_loss + config.kl_coef * kl
    loss = (weights * torch.where(correction.dropped, 0.0, token_loss)).sum()
    return loss, _metrics(columns, surrogate, correction)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Hold the result of an objective, each float32[N]; `clipped` is 1 where a bound took effect.

    Usage:

        surrogate = ppo(columns, config)
        clip_fraction = surrogate.clipped.mean()
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return the clipped objective `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    r = exp(logprob - old logprob). (PPO, Schulman et al. 2017, arXiv:1707.06347; two bounds: DAPO,
    Yu et al. 2025, arXiv:2503.14476.) With `dual_clip` c, it is at most `-c A` where A < 0 (Ye et
    al. 2020, arXiv:1912.09729, equation 5).
    """
    ratio = clamped(columns.logprobs - columns.old_logprobs).exp()
    return _clipped(ratio, columns.advantages, config)


def gspo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return PPO's objective with one ratio per sample, the geometric mean of its tokens' ratios.

    (GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7, with aggregation sequence_mean.
    The paper's bounds are much closer to 1: 3e-4 and 4e-4.)
    """
    log_ratio = columns.samples.mean(columns.logprobs - columns.old_logprobs)
    return _clipped(clamped(log_ratio).exp()[columns.samples.sample], columns.advantages, config)


def cispo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-sg(clip(r)) A logprob`: REINFORCE with a clipped weight.

    Every token keeps its gradient. (CISPO, MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5,
    where only the upper bound is used: clip_low = 1.)
    """
    ratio = clamped(columns.logprobs - columns.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -weight * columns.advantages * columns.logprobs
    return Surrogate(loss, ratio, (weight != ratio).float())


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ratio * advantages > bounded * advantages
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        below = (advantages < 0) & (gain < floor)
        gain = torch.where(below, floor, gain)
        clipped = clipped | below
    return Surrogate(-gain, ratio, clipped.float())


_OBJECTIVES: Mapping[str, Callable[[TokenColumns, LossConfig], Surrogate]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
}


def token_weights(
    samples: Samples, config: LossConfig, *, batch_tokens: float, batch_samples: int
) -> Tensor:
    """Return the weight of each token in the loss of the batch, float32[N].

    `batch_tokens` and `batch_samples` are counts of the whole batch. The weights add up to 1 over
    the batch for token_mean (arXiv:2503.14476) and, where every sample has a trained token, for
    sequence_mean (arXiv:2402.03300). fixed_length divides each sample's sum by `max_tokens` instead
    of its own length (Dr. GRPO, arXiv:2503.20783).
    """
    if config.aggregation == "token_mean":
        return samples.mask / max(batch_tokens, 1.0)
    if config.aggregation == "sequence_mean":
        tokens = samples.trained_tokens.clamp(min=1.0)[samples.sample]
        return samples.mask / (tokens * batch_samples)
    return samples.mask / (float(config.max_tokens or 1) * batch_samples)


def _metrics(
    columns: TokenColumns, surrogate: Surrogate, correction: Correction
) -> dict[str, Tensor]:
    logprobs = columns.logprobs
    values = {
        "loss/surrogate": correction.weights * surrogate.loss,
        "policy/entropy": columns.entropy,
        "policy/ratio": surrogate.ratio,
        "policy/kl_old": kl_estimate("k3", logprobs, columns.old_logprobs),
        "policy/clip_fraction": surrogate.clipped,
        "mismatch/importance": correction.weights,
        "mismatch/importance_square": correction.weights.square(),
        "mismatch/dropped_fraction": correction.dropped.float(),
        "mismatch/abs_logprob": (logprobs - columns.rollout_logprobs).abs(),
        "mismatch/kl": kl_estimate("k3", logprobs, columns.rollout_logprobs),
        "mismatch/log_ppl": -logprobs,
        "mismatch/rollout_log_ppl": -columns.rollout_logprobs,
    }
    if columns.ref_logprobs is not None:
        values["policy/kl_ref"] = kl_estimate("k3", logprobs, columns.ref_logprobs)
    trained = columns.mask > 0
    return {name: torch.where(trained, value, 0.0).sum().detach() for name, value in values.items()}


def derived_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an optimizer step from means over its trained tokens.

    Means that are needed only for a derived metric are removed.

    mismatch/ess: effective sample size of the tokens under the correction's weights, as a share,
    (sum w)^2 / (n sum w^2) (Kish 1965). mismatch/ppl, mismatch/rollout_ppl: perplexity of the
    responses under the trainer and under the engine; mismatch/ppl_ratio: their quotient.
    """
    metrics = dict(means)
    if "mismatch/importance" not in metrics:
        return metrics
    square = metrics.pop("mismatch/importance_square")
    log_ppl = metrics.pop("mismatch/log_ppl")
    rollout_log_ppl = metrics.pop("mismatch/rollout_log_ppl")
    log_ratio = max(-MAX_LOG_PPL, min(log_ppl - rollout_log_ppl, MAX_LOG_PPL))
    return metrics | {
        "mismatch/ess": metrics["mismatch/importance"] ** 2 / square if square else 0.0,
        "mismatch/ppl": math.exp(min(log_ppl, MAX_LOG_PPL)),
        "mismatch/rollout_ppl": math.exp(min(rollout_log_ppl, MAX_LOG_PPL)),
        "mismatch/ppl_ratio": math.exp(log_ratio),
    }
