from __future__ import annotations

import torch

from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Surrogate, TokenColumns

TEMPERATURE = 1.0
TEMPERATURE_BELOW_ZERO = 1.05  # of tokens with A <= 0


def sapo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-(4 / t) sigmoid(t (r - 1)) A`: a gradient that fades where PPO's ends at a bound.

    (SAPO, Gao et al. 2025, arXiv:2511.20347, with its temperatures t.)
    """
    ratio = columns.ratio()
    temperature = torch.full_like(ratio, TEMPERATURE)
    temperature = temperature.masked_fill(columns.advantages <= 0, TEMPERATURE_BELOW_ZERO)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return Surrogate(-gate * columns.advantages, ratio, torch.zeros_like(ratio))
