from __future__ import annotations

from consumer.config.learner import LossConfig
from consumer.grpo.learner.importance import clamped
from consumer.grpo.learner.losses import Surrogate, TokenColumns, clipped


def gspo(columns: TokenColumns, config: LossConfig) -> Surrogate:
    """Return PPO's objective with one ratio per sample, the geometric mean of its tokens' ratios.

    (GSPO, Zheng et al. 2025, arXiv:2507.18071, equations 5 to 7, with aggregation sequence_mean.
    The paper's bounds are much closer to 1: 3e-4 and 4e-4.)
    """
    log_ratio = columns.samples.mean(columns.logprobs - columns.old_logprobs)
    return clipped(clamped(log_ratio).exp()[columns.samples.sample], columns, config)
