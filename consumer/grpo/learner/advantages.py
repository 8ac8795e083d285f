"""Advantages: the reward of each rollout compared with the other rollouts of its prompt.

All functions take a batch's scores, one float32[k] per group (k may differ), return float32[sum k]
in the order of the groups, and raise WireError where a score is not finite. A group of one rollout
or of equal scores gets exactly 0: dividing by a tiny standard deviation would turn rounding errors
into advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.group import RolloutGroup
from consumer.config.learner import AdvantageEstimator

Scores = Sequence[NDArray[np.float32]]
Lengths = Sequence[NDArray[np.int32]]  # int32[k] per group: response tokens

Floats = NDArray[np.float64]

Sessions = Sequence[Sequence[str]]  # session ids of each group's rollouts


def session_advantages(
    estimator: AdvantageEstimator, scores: Scores, lengths: Lengths, sessions: Sessions
) -> NDArray[np.float32]:
    """Return `estimate_advantages`, where a session of an agent may have several rollouts.

    A session's rollouts share one reward: it counts once, with the total length of its rollouts,
    and all of them get its advantage.
    """
    if all(len(set(ids)) == len(ids) for ids in sessions):
        return estimate_advantages(estimator, scores, lengths)
    groups = [_session_order(ids) for ids in sessions]
    advantages = estimate_advantages(
        estimator,
        [score[first] for score, (first, _) in zip(scores, groups, strict=True)],
        [
            np.bincount(session, length).astype("<i4")
            for length, (_, session) in zip(lengths, groups, strict=True)
        ],
    )
    per_rollout = []
    start = 0
    for first, session in groups:
        per_rollout.append(advantages[start : start + len(first)][session])
        start += len(first)
    return np.concatenate(per_rollout)


def _session_order(ids: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the first rollout of each session, int[n], and the session of each rollout, int[k]."""
    _, first, session = np.unique(np.array(ids), return_index=True, return_inverse=True)
    # np.unique sorts by id
    order = np.argsort(first)
    return first[order], np.argsort(order)[session]


def estimate_advantages(
    estimator: AdvantageEstimator, scores: Scores, lengths: Lengths
) -> NDArray[np.float32]:
    """Return the advantages of the named estimator; only opo reads `lengths`."""
    if estimator == "opo":
        return opo_advantages(scores, lengths)
    return _OF_SCORES[estimator](scores)


def grpo_advantages(scores: Scores, *, eps: float = 1e-6) -> NDArray[np.float32]:
    """Return GRPO's advantages (outcome supervision): `(r - mean) / (std + eps)` in each group.

    (Shao et al. 2024, arXiv:2402.03300, section 4.1.2.) `std` has the divisor k - 1.
    """
    return _join([_standardize(group, eps) for group in _checked(scores)])


def dr_grpo_advantages(scores: Scores) -> NDArray[np.float32]:
    """Return Dr. GRPO's `r - mean` in each group (Liu et al. 2025, arXiv:2503.20783, section 3)."""
    return _join([_center(group) for group in _checked(scores)])


def rloo_advantages(scores: Scores) -> NDArray[np.float32]:
    """Return RLOO's advantages: `r_i` minus the mean of the other rewards of the group.

    (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, equation 6.)
    """
    groups = _checked(scores)
    return _join([_center(group) * (len(group) / max(1, len(group) - 1)) for group in groups])


def opo_advantages(scores: Scores, lengths: Lengths) -> NDArray[np.float32]:
    """Return OPO's advantages: `r` minus the mean weighted by response length.

    (Hao et al. 2025, arXiv:2505.23585, equation 8.)
    """
    groups = zip(_checked(scores), lengths, strict=True)
    return _join([_center(group, np.asarray(length, np.float64)) for group, length in groups])


def pass_at_k_advantages(scores: Scores, *, k: int = 4) -> NDArray[np.float32]:
    """Return the advantages of Pass@k training (Chen et al. 2025, arXiv:2508.10751, section 3.3).

    A rollout is right where its score is above 0. Of N rollouts, W wrong: R = 1 - C(W, k) / C(N, k)
    and S = sqrt(R (1 - R)); right rollouts get (1 - R) / S, wrong ones (1 - R - C(W - 1, k - 1) /
    C(N - 1, k - 1)) / S. In groups smaller than k, k = N.
    """
    return _join([_pass_at_k(group > 0, min(k, len(group))) for group in _checked(scores)])


def reinforce_pp_advantages(scores: Scores, *, eps: float = 1e-8) -> NDArray[np.float32]:
    """Return REINFORCE++'s advantages: `(r - mean) / (std + eps)` over the whole batch.

    (Hu et al. 2025, arXiv:2501.03262.)
    """
    return _over_batch(_checked(scores), eps)


def reinforce_pp_baseline_advantages(scores: Scores, *, eps: float = 1e-8) -> NDArray[np.float32]:
    """Subtract the mean of the group, then scale as REINFORCE++ (arXiv:2501.03262, section 3)."""
    return _over_batch([_center(group) for group in _checked(scores)], eps)


_OF_SCORES: dict[str, Callable[[Scores], NDArray[np.float32]]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "pass_at_k": pass_at_k_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
}


def _checked(scores: Scores) -> list[Floats]:
    for index, group in enumerate(scores):
        if not np.isfinite(group).all():
            raise WireError(
                f"group {index} of the batch: a score is not a finite number: "
                f"{np.asarray(group).tolist()}",
                hint='every rollout needs reward["score"] before it is trained',
            )
    return [np.asarray(group, np.float64) for group in scores]


def _center(group: Floats, weights: Floats | None = None) -> Floats:
    # compared, not subtracted: the mean of k equal floats may differ in the last bit
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
    n = len(right)
    wrong = int((~right).sum())
    mean = 1.0 - comb(wrong, k) / comb(n, k) if n else 0.0
    if mean in (0.0, 1.0):
        # every set of k has the same reward: no gradient
        return np.zeros(n)
    if_wrong = 1.0 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
    advantages: Floats = np.where(right, 1.0 - mean, if_wrong) / np.sqrt(mean * (1.0 - mean))
    return advantages


def _over_batch(groups: list[Floats], eps: float) -> NDArray[np.float32]:
    batch = np.concatenate(groups) if groups else np.zeros(0)
    centered = _center(batch)
    if centered.any():
        centered = centered / (batch.std() + eps)
    return centered.astype(np.float32)


def _join(groups: list[Floats]) -> NDArray[np.float32]:
    return np.concatenate(groups).astype(np.float32) if groups else np.zeros(0, np.float32)


def overlong_penalty(
    lengths: NDArray[np.int32], max_tokens: NDArray[np.int32], buffer_tokens: int
) -> NDArray[np.float32]:
    """Return the penalty of responses close to their token limit, float32[k], in [-1, 0].

    (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.) `lengths`, `max_tokens`: int32[k]. It is
    0 up to `max_tokens - buffer_tokens` and falls linearly to -1 at `max_tokens`.
    """
    over = np.asarray(lengths, np.float64) - (np.asarray(max_tokens, np.float64) - buffer_tokens)
    return (-np.clip(over / buffer_tokens, 0.0, 1.0)).astype(np.float32)


def shaped_scores(group: RolloutGroup, buffer_tokens: int | None) -> NDArray[np.float32]:
    """Return the scores with the overlong penalty, if there are `buffer_tokens`; float32[k]."""
    if buffer_tokens is None:
        return group.scores
    return group.scores + overlong_penalty(group.lengths, group.token_limits, buffer_tokens)
