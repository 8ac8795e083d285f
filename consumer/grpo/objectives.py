"""The objectives of the policy loss, by the names of [learner.loss] objective.

Their bounds, where the config names none, are those of `OBJECTIVES` in consumer/config/learner.py.
"""

from __future__ import annotations

import torch

from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Surrogate, TokenColumns, capped, clamped, clipped


def ppo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return the clipped objective `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    r = exp(logprob - old logprob). (PPO, Schulman et al. 2017, arXiv:1707.06347; two bounds, 0.2
    and 0.28, and the mean over tokens: DAPO, Yu et al. 2025, arXiv:2503.14476, section 4.1.) With
    `dual_clip` c, it is at most `-c A` where A < 0 (Ye et al. 2020, arXiv:1912.09729, equation 5).
    """
    return clipped(columns.ratio(), columns, config)


def gspo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return PPO's objective with one ratio per sample, the geometric mean of its tokens' ratios.

    (GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7: a mean over samples; section 5.1:
    bounds 3e-4 and 4e-4.)
    """
    log_ratio = columns.samples.mean(columns.logprobs - columns.old_logprobs)
    return clipped(clamped(log_ratio).exp()[columns.samples.sample], columns, config)


def cispo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-sg(clip(r)) A logprob`: REINFORCE with clipped weights: every token has a gradient.

    (CISPO, MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5, without a lower bound. It does not
    name the upper one: it is DAPO's here, as weights up to the 5 of ScaleRL, arXiv:2510.13786,
    learned no more from stale rollouts.)
    """
    ratio = columns.ratio().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -weight * columns.advantages * columns.logprobs
    return Surrogate(loss, ratio, (weight != ratio).float())


def dppo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-M r A`: M drops tokens by the change of their probability, not by its quotient.

    M is 0 where A > 0 and p - p_old > clip_high, or A < 0 and p_old - p > clip_low: rare tokens,
    whose ratio moves much at once, keep their gradient. (DPPO with the binary total variation, Qi
    et al. 2026, arXiv:2602.04879, with both bounds at 0.15.)
    """
    ratio = columns.ratio()
    change = columns.logprobs.detach().exp() - columns.old_logprobs.exp()
    too_high = (columns.advantages > 0) & (change > config.clip_high)
    too_low = (columns.advantages < 0) & (change < -config.clip_low)
    dropped = too_high | too_low
    loss = torch.where(dropped, 0.0, -ratio * columns.advantages)
    return Surrogate(capped(loss, ratio, columns, config), ratio, dropped.float())


TEMPERATURE = 1.0
TEMPERATURE_BELOW_ZERO = 1.05  # of tokens with A <= 0


def sapo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-(4 / t) sigmoid(t (r - 1)) A`: a gradient that fades where PPO's ends at a bound.

    (SAPO, Gao et al. 2025, arXiv:2511.20347, with its temperatures t and its mean over samples.)
    """
    ratio = columns.ratio()
    temperature = torch.full_like(ratio, TEMPERATURE)
    temperature = temperature.masked_fill(columns.advantages <= 0, TEMPERATURE_BELOW_ZERO)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return Surrogate(-gate * columns.advantages, ratio, torch.zeros_like(ratio))
