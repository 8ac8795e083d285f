"""Advantages: the reward of each rollout compared with the other rollouts of its prompt.

An estimator takes `GroupRewards` and returns an array for each group, float32[k] (one number per
rollout) or float32[R] (one per response token): those of `ESTIMATORS`, or a function of the user.
The formulas below take a batch's scores, one float32[k] per group (k may differ), return
float32[sum k], and raise WireError where a score is not finite. A group of one rollout or of equal
scores gets exactly 0: dividing by a tiny standard deviation would turn rounding errors into
advantages.

The segments of an agent's session are one rollout here: its reward counts once, and its tokens are
numbered from segment to segment (`SessionTokens`).
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
from consumer.config.trainer import PASS_AT
from consumer.grpo.learner.group_rewards import FULL_SCORE, GroupRewards, SessionTokens

Scores = Sequence[NDArray[np.float32]]
Lengths = Sequence[NDArray[np.intp]]  # int[k] per group

Floats = NDArray[np.float64]

EPS = 1e-4
"""What is added to a standard deviation, as in TRL and GDPO.

The usual scores differ by at least 0.1, and the rounding of a judge by 1e-7: with 1e-6, its noise
would have a tenth of the advantage of a right answer.
"""

Estimator = Callable[[Sequence[GroupRewards]], Sequence[NDArray[Any]]]


def load_estimator(name: str, reward_weights: Mapping[str, float] | None = None) -> Estimator:
    """Return one of `ESTIMATORS`, or "module:function" of the user. Raises ConfigError."""
    if name == "gdpo":
        return _of_sessions(partial(gdpo_advantages, weights=reward_weights or {}))
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


def _of_sessions(formula: Callable[[Sequence[GroupRewards]], NDArray[np.float32]]) -> Estimator:
    """Return the estimator of a formula that compares sessions, float32[sum of their numbers].

    It gets the first rollout of each session, whose advantage is that of all its rollouts.
    """

    def estimator(groups: Sequence[GroupRewards]) -> list[NDArray[np.float32]]:
        firsts = [np.isin(np.arange(len(g.scores)), g.firsts) for g in groups]
        joined = formula([group.part(own) for group, own in zip(groups, firsts, strict=True)])
        ends = np.cumsum([np.count_nonzero(own) for own in firsts])[:-1]
        found = np.split(joined, ends) if groups else []
        return [own[group.session] for own, group in zip(found, groups, strict=True)]

    return estimator


def grpo_advantages(scores: Scores, *, eps: float = EPS) -> NDArray[np.float32]:
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

    (Hao et al. 2025, arXiv:2505.23585, equation 8.) `lengths`: of the sampled tokens alone, as
    others have no gradient.
    """
    groups = zip(_checked(scores), lengths, strict=True)
    return _join([_center(group, np.asarray(length, np.float64)) for group, length in groups])


def pass_at_k_advantages(scores: Scores, *, k: int = PASS_AT) -> NDArray[np.float32]:
    """Return the advantages of Pass@k training (Chen et al. 2025, arXiv:2508.10751, section 3.3).

    A rollout is right where it has the full score (`FULL_SCORE`). Of N rollouts, W wrong: R = 1 -
    C(W, k) / C(N, k) and S = sqrt(R (1 - R)); right rollouts get (1 - R) / S, wrong ones (1 - R -
    C(W - 1, k - 1) / C(N - 1, k - 1)) / S. A group of at most k rollouts gets 0, as it is the only
    set of k.
    """
    right = [group >= FULL_SCORE for group in _checked(scores)]
    return _join([_pass_at_k(group, min(k, len(group))) for group in right])


def reinforce_pp_advantages(scores: Scores, *, eps: float = EPS) -> NDArray[np.float32]:
    """Return REINFORCE++'s advantages: `(r - mean) / (std + eps)` over the whole batch.

    (Hu et al. 2025, arXiv:2501.03262.)
    """
    return _over_batch(_checked(scores), eps)


def reinforce_pp_baseline_advantages(scores: Scores, *, eps: float = EPS) -> NDArray[np.float32]:
    """Subtract the mean of the group, then scale as REINFORCE++ (arXiv:2501.03262, section 3)."""
    return _over_batch([_center(group) for group in _checked(scores)], eps)


def gdpo_advantages(
    groups: Sequence[GroupRewards], *, weights: Mapping[str, float], eps: float = EPS
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

    A turn is a run of sampled tokens and what answers it, up to the next run; its reward is the sum
    of their token_rewards. It is standardized over the sessions that have a turn of that number,
    and counts for its turn and all before: process supervision (Shao et al. 2024, arXiv:2402.03300,
    section 4.1.3) by turn. Without token rewards, it is grpo.
    """
    sampled = [SessionTokens.of(group) for group in groups]
    rests = [replace(each.group, scores=each.outcomes()) for each in sampled]
    found = []
    for tokens, outcome in zip(sampled, ESTIMATORS["grpo"](rests), strict=True):
        shape = (len(outcome), int(tokens.turn.max(initial=-1)) + 1)  # sessions, turns
        number = tokens.session * shape[1] + tokens.turn
        has_turn = np.zeros(shape, np.bool_)
        has_turn.flat[number] = True
        sums = np.bincount(number, tokens.rewards, has_turn.size).astype(np.float64)
        rewards = sums.reshape(shape)
        for column, own in zip(rewards.T, has_turn.T, strict=True):
            column[own] = _standardize(column[own], EPS)
        to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
        of_token = np.repeat(outcome, tokens.group.lengths)[tokens.place]
        found.append(tokens.column(of_token + to_go[tokens.session, tokens.turn]))
    return found


def otb_advantages(groups: Sequence[GroupRewards]) -> list[NDArray[np.float32]]:
    """Return the optimal token baseline's advantages, float32[R] per group.

    (Li et al. 2026, arXiv:2602.07078.) A token's return is the score and the token_rewards from it
    on; its baseline is the mean return at its position among the sampled tokens of its session,
    weighted by the energy (`compute_energies`) that each session has gathered up to there. Behind
    the second longest session, where the mean would be the return itself, the last baseline before
    holds.
    """
    found = []
    for tokens in map(SessionTokens.of, groups):
        group = tokens.group
        scores = tokens.outcomes()[group.firsts]
        lengths = np.bincount(tokens.session, minlength=len(scores))
        shape = (len(scores), int(lengths.max(initial=0)))
        is_there = np.arange(shape[1]) < lengths[:, None]
        energy, rewards = np.zeros(shape), np.zeros(shape)
        if "energy" in group.tokens:
            energy[is_there] = group.tokens["energy"][tokens.place]
        rewards[is_there] = tokens.rewards
        returns = scores[:, None] + np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
        weights = np.cumsum(energy, axis=1) * is_there
        weights[:, weights.sum(0) == 0] = 1.0
        weights *= is_there
        baseline = (weights * returns).sum(0) / np.maximum(weights.sum(0), 1e-30)
        # exactly: the rounding of a mean of equal numbers is no advantage
        least = np.where(is_there, returns, np.inf).min(0)
        most = np.where(is_there, returns, -np.inf).max(0)
        baseline = np.where(least == most, least, baseline)
        shared = int(np.sort(lengths)[-2]) if len(lengths) > 1 else 0
        baseline[shared:] = baseline[shared - 1] if shared else scores.mean()
        found.append(tokens.column((returns - baseline)[is_there]))
    return found


def _opo(groups: Sequence[GroupRewards]) -> list[NDArray[np.float32]]:
    found = []
    for group in groups:
        scores = group.scores[group.firsts]
        sampled = np.bincount(SessionTokens.of(group).session, minlength=len(scores))
        found.append(opo_advantages([scores], [sampled])[group.session])
    return found


def _of_scores(formula: Callable[[Scores], NDArray[np.float32]]) -> Estimator:
    return _of_sessions(lambda groups: formula([group.scores for group in groups]))


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _of_scores(grpo_advantages),
    "dr_grpo": _of_scores(dr_grpo_advantages),
    "rloo": _of_scores(rloo_advantages),
    "opo": _opo,
    "pass_at_k": _of_scores(pass_at_k_advantages),
    "reinforce_pp": _of_scores(reinforce_pp_advantages),
    "reinforce_pp_baseline": _of_scores(reinforce_pp_baseline_advantages),
    "turns": turn_advantages,
    "otb": otb_advantages,
    "none": lambda groups: [np.zeros(len(group.scores), np.float32) for group in groups],
}
"""Estimators by their name in [trainer] advantages; gdpo, which has weights, is beside them."""

OVER_BATCH = ("gdpo", "reinforce_pp", "reinforce_pp_baseline")
"""Those that compare a rollout with those of other groups, too."""


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
