from __future__ import annotations

import torch

from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Surrogate, TokenColumns, capped


def dppo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-M r A`: M drops tokens by the change of their probability, not by its quotient.

    M is 0 where A > 0 and p - p_old > clip_high, or A < 0 and p_old - p > clip_low: rare tokens,
    whose ratio moves much at once, keep their gradient. (DPPO with the binary total variation, Qi
    et al. 2026, arXiv:2602.04879.)
    """
    ratio = columns.ratio()
    change = columns.logprobs.detach().exp() - columns.old_logprobs.exp()
    too_high = (columns.advantages > 0) & (change > config.clip_high)
    too_low = (columns.advantages < 0) & (change < -config.clip_low)
    dropped = too_high | too_low
    loss = torch.where(dropped, 0.0, -ratio * columns.advantages)
    return Surrogate(capped(loss, ratio, columns, config), ratio, dropped.float())
