"""Advantages: what each rollout's reward says compared with the other rollouts of its prompt.

Invariant: groups never mix, except in the batch-wide scale of REINFORCE++. A group of one, or one whose scores are all
equal, teaches nothing and gets exactly 0: not a tiny number that dividing by a tiny deviation would blow up.

All functions take the scores of a batch, one float32[k] per group (k may differ), and return float32[sum k] in the
order of the groups. They raise WireError where a score is not a finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError

Scores = Sequence[NDArray[np.float32]]
Lengths = Sequence[NDArray[np.int32]]
"""int32[k] per group: response tokens of each rollout."""

Floats = NDArray[np.float64]
AdvantageEstimator = Literal["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"]


Sessions = Sequence[Sequence[str]]
"""The session of each rollout of each group."""


def session_advantages(
    estimator: AdvantageEstimator, scores: Scores, lengths: Lengths, sessions: Sessions
) -> NDArray[np.float32]:
    """`estimate_advantages`, where one session of an agent may have several rollouts (its segments), with one reward.

    A session counts once in what it is compared with, however many segments it has; all of them get its advantage.
    """
    if all(len(set(names)) == len(names) for names in sessions):
        return estimate_advantages(estimator, scores, lengths)
    places = [np.unique(names, return_index=True, return_inverse=True) for names in map(np.array, sessions)]
    first = [np.sort(firsts) for _, firsts, _ in places]
    per_session = estimate_advantages(
        estimator,
        [score[ones] for score, ones in zip(scores, first, strict=True)],
        [
            np.bincount(inverse, length).astype("<i4")[np.argsort(firsts)]
            for length, (_, firsts, inverse) in zip(lengths, places, strict=True)
        ],
    )
    found, start = [], 0
    for _, firsts, inverse in places:
        own = per_session[start : start + len(firsts)]
        found.append(own[np.argsort(np.argsort(firsts))][inverse])
        start += len(firsts)
    return np.concatenate(found)


def estimate_advantages(estimator: AdvantageEstimator, scores: Scores, lengths: Lengths) -> NDArray[np.float32]:
    """The estimator of that name; `lengths` matter to opo alone."""
    return opo_advantages(scores, lengths) if estimator == "opo" else _OF_SCORES[estimator](scores)


def grpo_advantages(scores: Scores, *, eps: float = 1e-6) -> NDArray[np.float32]:
    """GRPO, outcome supervision: `(r - mean) / (std + eps)` within each group.

    (Shao et al. 2024, arXiv:2402.03300, section 4.1.2.)
    `std` is the unbiased estimate (divisor k - 1), as the common implementations read the paper's "std".
    """
    return _join([_standardize(group, eps) for group in _checked(scores)])


def dr_grpo_advantages(scores: Scores) -> NDArray[np.float32]:
    """Dr. GRPO: `r - mean`; not divided by the deviation, which favours very easy and very hard prompts
    (Liu et al. 2025, arXiv:2503.20783, section 3)."""
    return _join([_center(group) for group in _checked(scores)])


def rloo_advantages(scores: Scores) -> NDArray[np.float32]:
    """RLOO: `r_i` minus the mean of the others, which is `(r - mean) k / (k - 1)`
    (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, equation 6)."""
    return _join([_center(group) * (len(group) / max(1, len(group) - 1)) for group in _checked(scores)])


def opo_advantages(scores: Scores, lengths: Lengths) -> NDArray[np.float32]:
    """OPO: `r` minus the mean weighted by response length, the baseline of least variance where the gradient's
    square grows with the length (Hao et al. 2025, arXiv:2505.23585, equation 8)."""
    groups = zip(_checked(scores), lengths, strict=True)
    return _join([_center(group, np.asarray(length, np.float64)) for group, length in groups])


def pass_at_k_advantages(scores: Scores, *, k: int = 4) -> NDArray[np.float32]:
    """Pass@k training: the reward of a rollout is what it adds to the chance that one of k solves the prompt.

    (Chen et al. 2025, arXiv:2508.10751, section 3.3, the analytical form.) A rollout is right where its score is
    above 0. Of N rollouts, W wrong: R = 1 - C(W, k) / C(N, k) is the mean reward of a set of k, S = sqrt(R (1 - R));
    right ones get (1 - R) / S, wrong ones (1 - R - C(W - 1, k - 1) / C(N - 1, k - 1)) / S. Smaller groups: k = N.
    """
    return _join([_pass_at_k(group > 0, min(k, len(group))) for group in _checked(scores)])


def reinforce_pp_advantages(scores: Scores, *, eps: float = 1e-8) -> NDArray[np.float32]:
    """REINFORCE++: `(r - mean) / (std + eps)` over the whole batch (Hu et al. 2025, arXiv:2501.03262)."""
    return _over_batch(_checked(scores), eps)


def reinforce_pp_baseline_advantages(scores: Scores, *, eps: float = 1e-8) -> NDArray[np.float32]:
    """REINFORCE++ with a baseline: the mean of the group is taken off first (arXiv:2501.03262, section 3)."""
    return _over_batch([_center(group) for group in _checked(scores)], eps)


def gae(rewards: Floats, values: Floats, *, gamma: float = 1.0, lam: float = 1.0) -> tuple[Floats, Floats]:
    """Generalized advantage estimation over the R tokens of one rollout: advantages and returns, float64[R] each.

    `rewards` float64[R] (an outcome reward stands at the last token), `values` float64[R]: of the state before each
    token. After the last token the episode is over. (Schulman et al. 2016, arXiv:1506.02438, equation 16.)
    """
    advantages = np.zeros(len(rewards))
    following, next_value = 0.0, 0.0
    for place in range(len(rewards) - 1, -1, -1):
        surprise = rewards[place] + gamma * next_value - values[place]
        following = advantages[place] = surprise + gamma * lam * following
        next_value = values[place]
    return advantages, advantages + np.asarray(values, np.float64)


_OF_SCORES: dict[str, Callable[[Scores], NDArray[np.float32]]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "pass_at_k": pass_at_k_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
}


def _checked(scores: Scores) -> list[Floats]:
    for number, group in enumerate(scores):
        if not np.isfinite(group).all():
            raise WireError(
                f"group {number} of the batch: a score is not a finite number: {np.asarray(group).tolist()}",
                hint='every rollout needs reward["score"] before it is trained',
            )
    return [np.asarray(group, np.float64) for group in scores]


def _center(group: Floats, weights: Floats | None = None) -> Floats:
    # Equal scores are compared, not subtracted: the mean of k equal floats may differ in the last bit.
    if len(group) < 2 or (group == group[0]).all():
        return np.zeros_like(group)
    if weights is not None and not weights.any():
        weights = None
    centered: Floats = group - np.average(group, weights=weights)
    return centered


def _standardize(group: Floats, eps: float) -> Floats:
    centered = _center(group)
    return centered / (group.std(ddof=1) + eps) if centered.any() else centered


def _pass_at_k(right: NDArray[np.bool_], k: int) -> Floats:
    n, wrong = len(right), int((~right).sum())
    mean = 1.0 - comb(wrong, k) / comb(n, k) if n else 0.0
    if mean in (0.0, 1.0):  # every set of k is alike: nothing to learn
        return np.zeros(n)
    if_wrong = 1.0 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
    advantages: Floats = np.where(right, 1.0 - mean, if_wrong) / np.sqrt(mean * (1.0 - mean))
    return advantages


def _over_batch(groups: list[Floats], eps: float) -> NDArray[np.float32]:
    batch = np.concatenate(groups) if groups else np.zeros(0)
    centered = _center(batch)
    return (centered / (batch.std() + eps)).astype(np.float32) if centered.any() else centered.astype(np.float32)


def _join(groups: list[Floats]) -> NDArray[np.float32]:
    return np.concatenate(groups).astype(np.float32) if groups else np.zeros(0, np.float32)
