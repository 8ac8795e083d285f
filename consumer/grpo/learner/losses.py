"""Policy-gradient losses on flat columns: N response tokens of a micro-batch, S samples.

`token_weights` weighs tokens for the whole batch before it is divided into micro-batches, so the
gradient does not depend on that division.

Off-policy correction: rollouts were sampled by older weights, in an engine with other numerics. The
weight of a token is w = old policy / rollout policy, a number without gradient, of
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from buffer.errors import ConfigError
from buffer.imports import load_object
from consumer.config.learner import KlKind, LossConfig

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
    """The correction's `weights` of the loss, float32[N], 0 where `dropped`, bool[N].

    `measured`: the weights as metrics show them, also where the loss is not corrected.
    """

    weights: Tensor
    dropped: Tensor
    measured: Tensor


@torch.no_grad()
def correct(
    old_logprobs: Tensor, rollout_logprobs: Tensor, samples: Samples, config: LossConfig
) -> Correction:
    """Return the correction that `config` describes, from log-probabilities float32[N].

    Without `importance_cap` all weights of the loss are 1 and no token is dropped.
    """
    log_ratio = old_logprobs - rollout_logprobs
    level = log_ratio  # of each token's unit
    if config.importance_level == "sequence":
        level = samples.sum(log_ratio)[samples.sample]
    elif config.importance_level == "geometric":
        level = samples.mean(log_ratio)[samples.sample]
    weights = clamped(level).exp()
    dropped = torch.zeros_like(weights, dtype=torch.bool)
    if config.importance_cap is None:
        return Correction(torch.ones_like(weights), dropped, weights)
    if config.importance_mode == "mask":
        dropped = (weights > config.importance_cap) | (weights < config.importance_floor)
    if config.importance_veto is not None:
        impossible = (log_ratio < math.log(config.importance_veto)).to(weights.dtype)
        dropped = dropped | (samples.sum(impossible)[samples.sample] > 0)
    kept = torch.where(dropped, 0.0, weights.clamp(max=config.importance_cap))
    return Correction(kept, dropped, kept)


MAX_LOG_PPL = 80.0  # e^80 still fits into a float32


def kl_estimate(kind: KlKind, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy, reference) of each of the policy's tokens from logprobs, float32[N].

    The policy must be the one that sampled the tokens: with the arguments swapped, the mean is not
    the KL. With d = logprob - reference (Schulman 2020, "Approximating KL divergence"):
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
    """The inputs of the loss, float32[N] each; only `logprobs` and `entropy` carry a gradient."""

    logprobs: Tensor  # under the policy that is trained
    old_logprobs: Tensor  # under the policy that the ratio is clipped against
    rollout_logprobs: Tensor  # as the engine reported them
    advantages: Tensor  # of the token's sample
    samples: Samples  # which tokens are trained, and which belong to the same sample
    entropy: Tensor
    ref_logprobs: Tensor | None = None  # nan: the token has no KL term
    # of the rollouts, such as "teacher_logprobs/NAME"; nan where a rollout has none
    optional: Mapping[str, Tensor] = field(default_factory=dict)
    # the old policy is the one that sampled: the ratio is the importance weight
    old_is_rollout: bool = False
    extra_loss: Tensor | None = None  # to be added to the loss of each token
    extra_metrics: Mapping[str, Tensor] = field(default_factory=dict)  # sums over trained tokens

    @property
    def mask(self) -> Tensor:
        return self.samples.mask

    def without_masked(self) -> TokenColumns:
        """Return the columns with 0 for every token that is not trained.

        A mask on the loss is not enough: backward would multiply its 0 by an infinite derivative.
        """
        trained = self.mask > 0

        def zeroed(column: Tensor) -> Tensor:
            return torch.where(trained, column, 0.0)

        logprobs, reference = zeroed(self.logprobs), self.ref_logprobs
        if reference is not None:
            # at equal logprobs, the KL term and its gradient are 0
            reference = zeroed(torch.where(reference.isnan(), logprobs.detach(), reference))
        return replace(
            self,
            logprobs=logprobs,
            old_logprobs=zeroed(self.old_logprobs),
            rollout_logprobs=zeroed(self.rollout_logprobs),
            advantages=zeroed(self.advantages),
            entropy=zeroed(self.entropy),
            ref_logprobs=reference,
            extra_loss=None if self.extra_loss is None else zeroed(self.extra_loss),
        )

    def ratio(self) -> Tensor:
        """Return policy / old policy of each token, with gradient, float32[N]."""
        return clamped(self.logprobs - self.old_logprobs).exp()

    def importance(self, cap: float | None) -> Tensor:
        """Return policy / sampling policy, at most `cap`, with gradient, float32[N].

        Weighted by it, a mean over the tokens of an older policy is one over the policy's own.
        Without `cap`, nothing corrects for the rollouts: it is policy / old policy.
        """
        if cap is None:
            return self.ratio()
        weight = clamped(self.logprobs - self.rollout_logprobs).exp()
        return weight * (cap / weight.detach()).clamp(max=1.0)


def policy_loss(
    columns: TokenColumns, weights: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch, a scalar to sum over micro-batches, and its metrics.

    Metrics are sums over trained tokens, detached. Loss per token: objective times correction
    (`correct`), plus kl_coef * KL and the extra loss, minus entropy_coef * entropy;
    dropped tokens have none. Where the old policy is the one that sampled, the correction only
    drops tokens: the ratio is the weight. `weights`: float32[N] from `token_weights`.

    The KL of a token counts with its importance, whose gradient makes that of k3 the gradient of
    the KL (DeepSeek-V3.2, 2025, arXiv:2512.02556, section 3.1; TRL's `use_bias_correction_kl`).
    That of k2 is so without.
    """
    columns = columns.without_masked()
    surrogate = _surrogate(columns, config)
    old = columns.logprobs.detach() if columns.old_is_rollout else columns.old_logprobs
    correction = correct(old, columns.rollout_logprobs, columns.samples, config)
    factor = (~correction.dropped).float() if columns.old_is_rollout else correction.weights
    if config.off_policy_mask is not None:
        factor = factor * _near_or_praised(columns, config.off_policy_mask)
    surrogate = replace(surrogate, loss=factor * surrogate.loss)
    token_loss = surrogate.loss - config.entropy_coef * columns.entropy
    of_kl = columns.importance(config.importance_cap)
    if config.kl_kind != "k3":
        of_kl = of_kl.detach()
    if columns.ref_logprobs is not None:
        kl = kl_estimate(config.kl_kind, columns.logprobs, columns.ref_logprobs)
        token_loss = token_loss + config.kl_coef * of_kl * kl
    if columns.extra_loss is not None:
        token_loss = token_loss + columns.extra_loss
    loss = (weights * torch.where(correction.dropped, 0.0, token_loss)).sum()
    return loss, _metrics(columns, surrogate, correction, of_kl)


@torch.no_grad()
def _near_or_praised(columns: TokenColumns, bound: float) -> Tensor:
    """Return 0 for the tokens of bad samples that the policy has left behind, else 1, float32[N].

    The off-policy sequence mask: A < 0, and the mean of log(sampling / present policy) over the
    sample is above `bound` (DeepSeek-V3.2, 2025, arXiv:2512.02556, section 3.1).
    """
    distance = columns.samples.mean(clamped(columns.rollout_logprobs - columns.logprobs))
    is_far = distance[columns.samples.sample] > bound
    return (~(is_far & (columns.advantages < 0))).float()


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The result of an objective, float32[N] each; `ratio` and `clipped` are only for metrics."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


# Returns the loss of each token, float32[N], without correction, KL and entropy; a bare Tensor
# counts as unclipped. Columns of untrained tokens are 0.
Objective = Callable[[TokenColumns, LossConfig], Surrogate | Tensor]


def clipped(ratio: Tensor, columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return PPO's clipped loss: the smaller gain of the ratio and the clipped ratio, negated."""
    advantages = columns.advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    is_clipped = ratio * advantages > bounded * advantages
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        below = (advantages < 0) & (gain < floor)
        gain = torch.where(below, floor, gain)
        is_clipped = is_clipped | below
    return Surrogate(capped(-gain, ratio, columns, config), ratio, is_clipped.float())


def capped(loss: Tensor, ratio: Tensor, columns: TokenColumns, config: LossConfig) -> Tensor:
    """Scale down the loss where a ratio to the sampling policy is above `importance_cap`.

    The gradient of `ratio * A` is then that of `min(ratio, cap) * A * log ratio`.
    """
    if not columns.old_is_rollout or config.importance_cap is None:
        return loss
    return loss * (config.importance_cap / ratio.detach()).clamp(max=1.0)


@cache
def load_objective(name: str) -> Objective:
    """Return an objective of `objectives.py`, or "module:function". Raises ConfigError."""
    spec = name if ":" in name else f"consumer.grpo.objectives:{name}"
    found: Objective = load_object(spec, kind="objective of [learner.loss]")
    return found


def _surrogate(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Call the objective. Raises ConfigError unless it returns one loss for each token."""
    found = load_objective(config.objective)(columns, config)
    if isinstance(found, Tensor):
        ratio = columns.ratio().detach()
        found = Surrogate(found, ratio, torch.zeros_like(ratio))
    if not isinstance(found, Surrogate):
        raise _unusable(config, repr(found), columns)
    for value in (found.loss, found.ratio, found.clipped):
        if not isinstance(value, Tensor):
            raise _unusable(config, repr(value), columns)
        if value.shape != columns.logprobs.shape or not value.is_floating_point():
            raise _unusable(config, f"{value.dtype}{list(value.shape)}", columns)
    return found


def _unusable(config: LossConfig, returned: str, columns: TokenColumns) -> ConfigError:
    return ConfigError(
        f"[learner.loss] objective = {config.objective} returned {returned[:200]} for "
        f"{columns.logprobs.numel()} tokens",
        hint="return the loss of each token as a float32[N], or a Surrogate of three",
    )


def token_weights(
    samples: Samples, config: LossConfig, *, batch_tokens: float, batch_samples: int
) -> Tensor:
    """Return the weight of each token in the loss of the batch, float32[N].

    `batch_tokens`, `batch_samples`: counts of the whole batch. Weights add up to 1 over the batch
    for token_mean (arXiv:2503.14476) and, if every sample has a trained token, for sequence_mean
    (arXiv:2402.03300). fixed_length divides each sample by `max_tokens` (arXiv:2503.20783).
    """
    if config.aggregation == "token_mean":
        return samples.mask / max(batch_tokens, 1.0)
    if config.aggregation == "sequence_mean":
        tokens = samples.trained_tokens.clamp(min=1.0)[samples.sample]
        return samples.mask / (tokens * batch_samples)
    return samples.mask / (float(config.max_tokens or 1) * batch_samples)


def _metrics(
    columns: TokenColumns, surrogate: Surrogate, correction: Correction, of_kl: Tensor
) -> dict[str, Tensor]:
    logprobs, importance = columns.logprobs, correction.measured
    values = {
        "loss/surrogate": surrogate.loss,
        "policy/entropy": columns.entropy,
        "policy/ratio": surrogate.ratio,
        "policy/kl_old": kl_estimate("k3", columns.old_logprobs, logprobs),
        "policy/clip_fraction": surrogate.clipped,
        "mismatch/importance": importance,
        "mismatch/importance_square": importance.square(),
        "mismatch/dropped_fraction": correction.dropped.float(),
        "mismatch/abs_logprob": (logprobs - columns.rollout_logprobs).abs(),
        "mismatch/kl": kl_estimate("k3", columns.rollout_logprobs, logprobs),
        "mismatch/log_ppl": -logprobs,
        "mismatch/rollout_log_ppl": -columns.rollout_logprobs,
    }
    if columns.ref_logprobs is not None:
        values["policy/kl_ref"] = of_kl * kl_estimate("k3", logprobs, columns.ref_logprobs)
    trained = columns.mask > 0
    sums = {name: torch.where(trained, value, 0.0).sum().detach() for name, value in values.items()}
    return sums | dict(columns.extra_metrics)


def derived_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Derive metrics of an optimizer step from means over its trained tokens; drop helper means.

    mismatch/ess: effective sample size as a share, (sum w)^2 / (n sum w^2) (Kish 1965).
    mismatch/ppl, mismatch/rollout_ppl: perplexity under trainer and engine; ppl_ratio: quotient.
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
