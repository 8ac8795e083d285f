"""Advantages: what each rollout's reward says compared with the other rollouts of its prompt.

Invariant: groups never mix. A group of one, or one whose scores are all equal, teaches nothing and gets
exactly 0: not a tiny number that dividing by a tiny deviation would blow up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError

Scores = Sequence[NDArray[np.float32]]
"""One float32[k] per group; k may differ from group to group."""

AdvantageEstimator = Literal["grpo", "dr_grpo"]


def grpo_advantages(scores: Scores, *, eps: float = 1e-6) -> NDArray[np.float32]:
    """GRPO, outcome supervision: `(r - mean) / (std + eps)` within each group.

    (Shao et al. 2024, arXiv:2402.03300, section 4.1.2.)
    `std` is the unbiased estimate (divisor k - 1), as the common implementations read the paper's "std".
    Returns float32[sum k] in the order of the groups. Raises WireError where a score is not a finite number.
    """
    return _join([_standardize(group, eps) for group in _checked(scores)])


def dr_grpo_advantages(scores: Scores) -> NDArray[np.float32]:
    """Dr. GRPO: `r - mean`; not divided by the deviation, which favours very easy and very hard prompts
    (Liu et al. 2025, arXiv:2503.20783, section 3).

    Returns float32[sum k]. Raises WireError like `grpo_advantages`.
    """
    return _join([_center(group) for group in _checked(scores)])


def estimate_advantages(estimator: AdvantageEstimator, scores: Scores) -> NDArray[np.float32]:
    """The estimator of that name. Returns float32[sum k]."""
    return grpo_advantages(scores) if estimator == "grpo" else dr_grpo_advantages(scores)


def _checked(scores: Scores) -> list[NDArray[np.float64]]:
    for number, group in enumerate(scores):
        if not np.isfinite(group).all():
            raise WireError(
                f"group {number} of the batch: a score is not a finite number: {np.asarray(group).tolist()}",
                hint='every rollout needs reward["score"] before it is trained',
            )
    return [np.asarray(group, np.float64) for group in scores]


def _center(group: NDArray[np.float64]) -> NDArray[np.float64]:
    # Equal scores are compared, not subtracted: the mean of k equal floats may differ in the last bit.
    if len(group) < 2 or (group == group[0]).all():
        return np.zeros_like(group)
    centered: NDArray[np.float64] = group - group.mean()
    return centered


def _standardize(group: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    centered = _center(group)
    return centered / (group.std(ddof=1) + eps) if centered.any() else centered


def _join(groups: list[NDArray[np.float64]]) -> NDArray[np.float32]:
    return np.concatenate(groups).astype(np.float32) if groups else np.zeros(0, np.float32)
