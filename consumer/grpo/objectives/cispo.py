from __future__ import annotations

from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Surrogate, TokenColumns


def cispo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return `-sg(clip(r)) A logprob`: REINFORCE with clipped weights: every token has a gradient.

    (CISPO, MiniMax-M1 2025, arXiv:2506.13585, equations 4 and 5; there clip_low = 1.)
    """
    ratio = columns.ratio().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -weight * columns.advantages * columns.logprobs
    return Surrogate(loss, ratio, (weight != ratio).float())
