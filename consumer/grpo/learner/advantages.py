"""Advantages: the reward of each rollout compared with the other rollouts of its prompt.

An estimator takes `GroupRewards` and returns an array for each group, float32[k] (one number per
rollout) or float32[R] (one per response token): those of `ESTIMATORS`, or a function of the user.
The formulas below take a batch's scores, one float32[k] per group (k may differ), return
float32[sum k], and raise WireError where a score is not finite. A group of one rollout or of equal
scores gets exactly 0: dividing by a tiny standard deviation would turn rounding errors into
advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from buffer.imports import load_function
from consumer.grpo.learner.group_rewards import GroupRewards

Scores = Sequence[NDArray[np.float32]]
Lengths = Sequence[NDArray[np.int32]]  # int32[k] per group: response tokens

Floats = NDArray[np.float64]


Estimator = Callable[[Sequence[GroupRewards]], Sequence[NDArray[Any]]]


def load_estimator(name: str, reward_weights: Mapping[str, float] | None = None) -> Estimator:
    """Return one of `ESTIMATORS`, or "module:function" of the user. Raises ConfigError."""
    if name == "gdpo":
        return _of_rollouts(partial(gdpo_advantages, weights=reward_weights or {}))
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return load_function(name, kind="advantages of [trainer]")


def estimate(
    name: str, estimator: Estimator, groups: Sequence[GroupRewards]
) -> list[NDArray[np.float32]]:
    """Call an estimator for each role, as rewards are compared within a role.

    (SPIRAL's role-conditioned advantages, Liu et al. 2025, arXiv:2506.24119, with the group's
    baselines.) Raises as `_estimate`.
    """
    roles = sorted({role for group in groups for role in group.roles})
    if len(roles) < 2:
        return _estimate(name, estimator, groups)
    found = [np.zeros(int(group.lengths.sum()), np.float32) for group in groups]
    for role in roles:
        chosen = [(n, np.array(group.roles) == role) for n, group in enumerate(groups)]
        own = [(n, of_role, groups[n].part(of_role)) for n, of_role in chosen if of_role.any()]
        advantages = _estimate(name, estimator, [part for *_, part in own])
        for (n, of_role, part), values in zip(own, advantages, strict=True):
            found[n][np.repeat(of_role, groups[n].lengths)] = per_token(values, part.lengths)
    return found


def _estimate(
    name: str, estimator: Estimator, groups: Sequence[GroupRewards]
) -> list[NDArray[np.float32]]:
    """Call an estimator. Raises ConfigError unless it returns finite numbers of a right length."""
    found = list(estimator(groups))
    if len(found) != len(groups):
        raise _unusable(name, f"{len(found)} arrays for {len(groups)} groups")
    advantages = []
    for group, values in zip(groups, found, strict=True):
        array = np.asarray(values, np.float32)
        k, tokens = len(group.scores), int(group.lengths.sum())
        if array.shape not in ((k,), (tokens,)):
            shape = list(array.shape)
            raise _unusable(name, f"shape {shape} for {k} rollouts with {tokens} tokens")
        if not np.isfinite(array).all():
            raise _unusable(name, "a number that is not finite")
        advantages.append(array)
    return advantages


def _unusable(name: str, returned: str) -> ConfigError:
    return ConfigError(
        f"[trainer] advantages = {name} returned {returned}",
        hint="return an array for each group: one number per rollout, or one per response token",
    )


def per_token(advantages: NDArray[np.float32], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return float32[R] from that, or from one number per rollout."""
    is_per_rollout = len(advantages) == len(lengths)
    return np.repeat(advantages, lengths) if is_per_rollout else advantages


def _of_rollouts(formula: Callable[[Sequence[GroupRewards]], NDArray[np.float32]]) -> Estimator:
    """Return the estimator of a formula that compares rollouts, float32[sum k].

    The rollouts of a session share one reward: it counts once, with the total length of its
    rollouts, and all of them get its advantage.
    """

    def estimator(groups: Sequence[GroupRewards]) -> list[NDArray[np.float32]]:
        merged = [_by_session(group) for group in groups]
        joined = formula([whole for whole, _ in merged])
        found = []
        start = 0
        for whole, session in merged:
            end = start + len(whole.scores)
            found.append(joined[start:end][session])
            start = end
        return found

    return estimator


def _by_session(group: GroupRewards) -> tuple[GroupRewards, NDArray[np.intp]]:
    """Return the group with a rollout per session, and the session of each rollout, int[k]."""
    if len(set(group.sessions)) == len(group.sessions):
        return group, np.arange(len(group.sessions))
    numbers: dict[str, int] = {}
    session = np.array([numbers.setdefault(name, len(numbers)) for name in group.sessions])
    is_first = np.diff(np.maximum.accumulate(session), prepend=-1) > 0
    lengths = np.bincount(session, group.lengths).astype(np.int32)
    whole = replace(group.part(is_first), lengths=lengths)
    return whole, session


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


def gdpo_advantages(
    groups: Sequence[GroupRewards], *, weights: Mapping[str, float], eps: float = 1e-4
) -> NDArray[np.float32]:
    """Return GDPO's advantages: each part of the reward is standardized in its group by itself.

    Their weighted sum is then standardized over the batch: a part with small differences counts as
    much as one with large ones. Rollouts without a part get 0 for it. (Liu et al. 2026,
    arXiv:2601.05242, section 3.) `weights`: of the parts, by name. Raises ConfigError where no
    rollout has any of them.
    """
    found = {name for group in groups for name in group.rewards}
    if groups and found.isdisjoint(weights):
        raise ConfigError(
            f"no reward of the batch has a part of [trainer] reward_weights: {', '.join(weights)}",
            hint=f"the judges return {', '.join(sorted(found)) or 'no numbers'}",
        )
    joined = []
    for group in groups:
        total = np.zeros(len(group.scores))
        for name, weight in weights.items():
            part = group.rewards.get(name, np.full(len(total), np.nan))
            has_part = np.isfinite(part)
            total[has_part] += weight * _standardize(part[has_part], eps)
        joined.append(total)
    return _standardize(np.concatenate([np.zeros(0), *joined]), eps).astype(np.float32)


def turn_advantages(groups: Sequence[GroupRewards]) -> list[NDArray[np.float32]]:
    """Return GRPO's advantages with those of the turns' `token_rewards`, float32[R] per group.

    A turn is a run of trained tokens and what answers it, up to the next run; its reward is the sum
    of their token_rewards. It is standardized over the rollouts that have a turn of that number,
    and counts for its turn and all before: process supervision (Shao et al. 2024, arXiv:2402.03300,
    section 4.1.3) by turn. Without token rewards, it is grpo.
    """
    outcomes = ESTIMATORS["grpo"](groups)
    return [_add_turns(group, own) for group, own in zip(groups, outcomes, strict=True)]


def _add_turns(group: GroupRewards, outcome: NDArray[np.float32]) -> NDArray[np.float32]:
    ends = np.cumsum(group.lengths)[:-1]
    masks = np.split(group.tokens["mask"] > 0, ends)
    # the turn of each token, counted from 0; -1: before the first one
    turns = [np.cumsum(mask & ~np.append(False, mask[:-1])) - 1 for mask in masks]
    counts = [int(turn.max(initial=-1)) + 1 for turn in turns]
    rewards = np.full((len(turns), max(counts)), np.nan)
    given = np.nan_to_num(group.tokens.get("token_rewards", np.zeros(len(group.tokens["mask"]))))
    for row, turn, count, own in zip(rewards, turns, counts, np.split(given, ends), strict=True):
        row[:count] = np.bincount(turn + 1, own, count + 1)[1:]
    for column in rewards.T:
        has_turn = np.isfinite(column)
        column[has_turn] = _standardize(column[has_turn], 1e-6)
    to_go = np.cumsum(np.nan_to_num(rewards)[:, ::-1], axis=1)[:, ::-1]
    rows = zip(outcome, to_go, turns, strict=True)
    # index -1 is the 0 at the end
    return _join([base + np.append(row, 0.0)[turn] for base, row, turn in rows])


def otb_advantages(groups: Sequence[GroupRewards]) -> list[NDArray[np.float32]]:
    """Return the optimal token baseline's advantages, float32[R] per group.

    (Li et al. 2026, arXiv:2602.07078.) A token's return is the score and the token_rewards from it
    on; its baseline is the mean return at its position, weighted by the energy (`compute_energies`)
    that each rollout has gathered up to there. Behind the second longest response, where the mean
    would be the return itself, the last baseline before holds.
    """
    return [_otb(group) for group in groups]


def _otb(group: GroupRewards) -> NDArray[np.float32]:
    shape = (len(group.lengths), int(group.lengths.max(initial=0)))
    is_there = np.arange(shape[1]) < group.lengths[:, None]
    columns = [group.tokens.get(name) for name in ("energy", "token_rewards")]
    energy, rewards = np.zeros(shape), np.zeros(shape)
    for matrix, column in zip((energy, rewards), columns, strict=True):
        matrix[is_there] = 0.0 if column is None else np.nan_to_num(column)
    returns = group.scores[:, None] + np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    weights = np.cumsum(energy, axis=1) * is_there
    weights[:, weights.sum(0) == 0] = 1.0
    weights *= is_there
    baseline = (weights * returns).sum(0) / np.maximum(weights.sum(0), 1e-30)
    shared = int(np.sort(group.lengths)[-2]) if len(group.lengths) > 1 else 0
    baseline[shared:] = baseline[shared - 1] if shared else group.scores.mean()
    # rounding of a mean of equal numbers is no advantage
    centered = np.where(np.ptp(returns, axis=0) == 0, 0.0, returns - baseline)
    return centered[is_there].astype(np.float32)


def _of_scores(formula: Callable[[Scores], NDArray[np.float32]]) -> Estimator:
    return _of_rollouts(lambda groups: formula([group.scores for group in groups]))


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _of_scores(grpo_advantages),
    "dr_grpo": _of_scores(dr_grpo_advantages),
    "rloo": _of_scores(rloo_advantages),
    "opo": _of_rollouts(
        lambda groups: opo_advantages([g.scores for g in groups], [g.lengths for g in groups])
    ),
    "pass_at_k": _of_scores(pass_at_k_advantages),
    "reinforce_pp": _of_scores(reinforce_pp_advantages),
    "reinforce_pp_baseline": _of_scores(reinforce_pp_baseline_advantages),
    "turns": turn_advantages,
    "otb": otb_advantages,
    "none": lambda groups: [np.zeros(len(group.scores), np.float32) for group in groups],
}
"""Estimators by their name in [trainer] advantages; gdpo, which has weights, is beside them."""


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
