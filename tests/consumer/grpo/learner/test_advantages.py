from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError, WireError
from consumer.grpo.learner.advantages import (
    ESTIMATORS,
    dr_grpo_advantages,
    estimate,
    gdpo_advantages,
    grpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    per_token,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from consumer.grpo.learner.group_rewards import GroupRewards, overlong_penalty

SCORE = st.floats(-10, 10, width=32)
GROUPS = st.lists(st.lists(SCORE, min_size=1, max_size=9), max_size=5)


def column(*scores: float) -> np.ndarray:
    return np.array(scores, np.float32)


def make_rewards(
    scores: Any,
    lengths: Any = None,
    sessions: list[str] | None = None,
    roles: list[str] | None = None,
    *,
    rewards: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
) -> GroupRewards:
    lengths = np.ones(len(scores)) if lengths is None else lengths
    return GroupRewards(
        scores=np.array(scores, np.float32),
        lengths=np.array(lengths, np.int32),
        sessions=sessions or [str(n) for n in range(len(scores))],
        roles=roles or [""] * len(scores),
        rewards={name: np.array(part, np.float64) for name, part in (rewards or {}).items()},
        tokens={"mask": np.ones(int(sum(lengths)))} | (tokens or {}),
    )


@given(GROUPS)
def test_grpo_equals_the_paper_for_ragged_groups(groups: list[list[float]]) -> None:
    expected = []
    for scores in groups:
        mean = sum(scores) / len(scores)
        equal = len(set(scores)) == 1
        std = 0.0 if equal else (sum((r - mean) ** 2 for r in scores) / (len(scores) - 1)) ** 0.5
        expected += [0.0 if equal else (r - mean) / (std + 1e-4) for r in scores]
    got = grpo_advantages([column(*scores) for scores in groups])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@given(GROUPS)
def test_dr_grpo_equals_the_paper_for_ragged_groups(groups: list[list[float]]) -> None:
    expected = [r - sum(scores) / len(scores) for scores in groups for r in scores]
    got = dr_grpo_advantages([column(*scores) for scores in groups])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("scores", [[0.1] * 7, [1.0], [-3.3] * 3])
def test_advantages_are_exactly_zero_where_scores_are_equal(
    estimator: str, scores: list[float]
) -> None:
    energy = {"energy": np.linspace(0.1, 1, sum(range(len(scores))))}
    rewards = make_rewards(scores, np.arange(len(scores)), tokens=energy)
    (got,) = ESTIMATORS[estimator]([rewards])
    assert got.dtype == np.float32
    assert (got == 0).all()


@given(GROUPS)
def test_rloo_compares_each_rollout_with_the_mean_of_the_others(groups: list[list[float]]) -> None:
    expected = []
    for scores in groups:
        for position, score in enumerate(scores):
            others = scores[:position] + scores[position + 1 :]
            expected.append(score - sum(others) / len(others) if others else 0.0)
    np.testing.assert_allclose(
        rloo_advantages([column(*scores) for scores in groups]), expected, rtol=1e-4, atol=1e-4
    )


@given(st.lists(st.tuples(SCORE, st.integers(1, 5000)), min_size=2, max_size=9))
def test_opo_takes_off_the_mean_weighted_by_length(group: list[tuple[float, int]]) -> None:
    scores, lengths = zip(*group, strict=True)
    baseline = sum(score * length for score, length in group) / sum(lengths)
    got = opo_advantages([column(*scores)], [np.array(lengths, "<i4")])
    np.testing.assert_allclose(got, [score - baseline for score in scores], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("n", "right", "k"), [(8, 3, 4), (8, 1, 4), (8, 6, 2), (5, 2, 3), (4, 1, 4), (6, 3, 1)]
)
def test_pass_at_k_is_the_mean_over_all_sets_of_k(n: int, right: int, k: int) -> None:
    """Follow the definition: a set of k is worth 1 if one of it is right, else 0.

    A rollout gets the mean standardized worth of the sets that contain it.
    """
    scores = [1.0] * right + [0.0] * (n - right)
    sets = list(combinations(range(n), k))
    worth = np.array([max(scores[i] for i in chosen) for chosen in sets])
    got = pass_at_k_advantages([column(*scores)], k=k)
    if worth.std() == 0:
        assert (got == 0).all()
        return
    standardized = (worth - worth.mean()) / worth.std()
    expected = [
        np.mean([a for a, chosen in zip(standardized, sets, strict=True) if i in chosen])
        for i in range(n)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_pass_at_k_counts_full_scores_alone_as_right() -> None:
    partial = pass_at_k_advantages([column(1.0, 0.9, 0.1, 0.0, 0.0)])
    assert partial.tolist() == pass_at_k_advantages([column(1, 0, 0, 0, 0)]).tolist()
    assert partial[0] > 0 > partial[1]
    assert not pass_at_k_advantages([column(0.1, 0.9, 0.1, 0.0, 0.0)]).any()


@pytest.mark.parametrize("name", ["grpo", "turns", "reinforce_pp", "reinforce_pp_baseline"])
def test_the_rounding_of_a_judge_is_hardly_an_advantage(name: str) -> None:
    """One step of a float between two scores that mean the same."""
    scores = [0.7, 0.7, float(np.nextafter(np.float32(0.7), np.float32(1)))]
    (got,) = ESTIMATORS[name]([make_rewards(scores)])
    assert 0 < np.abs(got).max() < 0.01


@given(GROUPS)
def test_reinforce_pp_standardizes_over_the_batch(groups: list[list[float]]) -> None:
    batch = np.array([score for scores in groups for score in scores], np.float32).astype(
        np.float64
    )
    columns = [column(*scores) for scores in groups]
    if len(set(batch.tolist())) > 1:
        expected = (batch - batch.mean()) / (batch.std() + 1e-4)
        np.testing.assert_allclose(reinforce_pp_advantages(columns), expected, rtol=1e-4, atol=1e-4)
        centered = np.concatenate(
            [group - group.mean() for group in (c.astype(np.float64) for c in columns)]
        )
        expected = centered / (centered.std() + 1e-4)
        np.testing.assert_allclose(
            reinforce_pp_baseline_advantages(columns), expected, rtol=1e-3, atol=1e-3
        )


def test_overlong_penalty_falls_linearly_before_the_limit() -> None:
    lengths = np.array([0, 80, 90, 100, 130], "<i4")
    limits = np.full(5, 100, "<i4")
    np.testing.assert_allclose(overlong_penalty(lengths, limits, 20), [0, 0, -0.5, -1, -1])


def test_advantages_refuse_a_group_when_a_score_is_missing() -> None:
    with pytest.raises(WireError, match="group 1"):
        grpo_advantages([column(0, 1), column(0, float("nan"))])


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name not in ("turns", "otb")])
def test_a_session_counts_once_however_many_segments_it_has(estimator: str) -> None:
    """Compare sessions that have segments with whole rollouts: segments share the advantage."""
    dice = np.random.default_rng(5)
    whole, cut = [], []
    for _ in range(30):
        reward = dice.random(4).astype("<f4")
        tokens = dice.integers(3, 90, 4).astype("<i4")
        order = dice.permutation(np.repeat(np.arange(4), dice.integers(1, 4, 4)))
        # segments of a session share its length, one way or another
        parts = np.array(
            [
                tokens[s] if position == np.argmax(order == s) else 0
                for position, s in enumerate(order)
            ],
            "<i4",
        )
        assert (np.bincount(order, parts) == tokens).all()
        whole.append(make_rewards(reward, tokens))
        cut.append(make_rewards(reward[order], parts, [f"s{number}" for number in order]))
    once = ESTIMATORS[estimator](whole)
    found = ESTIMATORS[estimator](cut)
    for group, expected, got in zip(cut, once, found, strict=True):
        assert got == pytest.approx([expected[int(name[1:])] for name in group.sessions], abs=1e-6)


def test_gdpo_standardizes_each_part_in_its_group_and_their_sum_over_the_batch() -> None:
    dice = np.random.default_rng(2)
    names = {"right": 1.0, "format": 0.3}
    groups = [
        make_rewards(dice.random(k), rewards={name: dice.random(k) for name in names})
        for k in (4, 2, 7)
    ]
    sums = []
    for group in groups:
        for n in range(len(group.scores)):
            total = 0.0
            for name, weight in names.items():
                part = group.rewards[name].tolist()
                mean = sum(part) / len(part)
                spread = (sum((r - mean) ** 2 for r in part) / (len(part) - 1)) ** 0.5
                total += weight * (part[n] - mean) / (spread + 1e-4)
            sums.append(total)
    mean = sum(sums) / len(sums)
    spread = (sum((a - mean) ** 2 for a in sums) / (len(sums) - 1)) ** 0.5
    expected = [(a - mean) / (spread + 1e-4) for a in sums]
    np.testing.assert_allclose(gdpo_advantages(groups, weights=names), expected, rtol=1e-6)


def test_gdpo_gives_nothing_for_a_part_that_a_rollout_or_a_group_lacks() -> None:
    groups = [make_rewards([0, 1, 1], rewards={"a": [0, 1, np.nan]}), make_rewards([0, 1])]
    got = gdpo_advantages(groups, weights={"a": 1.0})
    assert got.tolist() == pytest.approx([-np.sqrt(2), np.sqrt(2), 0, 0, 0], abs=1e-3)
    with pytest.raises(ConfigError, match="reward_weights: b"):
        gdpo_advantages(groups, weights={"b": 1.0})


ROLES = st.lists(st.sampled_from(["", "proposer", "solver"]), min_size=1, max_size=9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(st.lists(ROLES, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_rewards_are_compared_within_a_role(name: str, roles: list[list[str]], dice: Any) -> None:
    groups = []
    for group in roles:
        lengths = [dice.randint(1, 4) for _ in group]
        numbers = {
            "mask": np.array([dice.random() > 0.3 for _ in range(sum(lengths))], "u1"),
            "token_rewards": np.array([dice.random() for _ in range(sum(lengths))], "<f4"),
        }
        scores = [dice.choice([0.0, 0.5, 1.0]) for _ in group]
        groups.append(make_rewards(scores, lengths, roles=group, tokens=numbers))
    found = estimate(name, ESTIMATORS[name], groups)
    for role in {role for group in roles for role in group}:
        having = [n for n, group in enumerate(roles) if role in group]
        parts = [groups[n].part(np.array(roles[n]) == role) for n in having]
        for n, part, expected in zip(having, parts, ESTIMATORS[name](parts), strict=True):
            tokens = np.repeat([own == role for own in roles[n]], groups[n].lengths)
            got = per_token(found[n], groups[n].lengths)[tokens]
            np.testing.assert_allclose(got, per_token(expected, part.lengths), atol=1e-6)
