"""PPO's objective, also of GRPO and DAPO."""

from __future__ import annotations

from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Surrogate, TokenColumns, clipped


def ppo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return the clipped objective `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    r = exp(logprob - old logprob). (PPO, Schulman et al. 2017, arXiv:1707.06347; two bounds: DAPO,
    Yu et al. 2025, arXiv:2503.14476.) With `dual_clip` c, it is at most `-c A` where A < 0 (Ye et
    al. 2020, arXiv:1912.09729, equation 5).
    """
    return clipped(columns.ratio(), columns, config)
