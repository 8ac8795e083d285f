"""Accuracy counts full scores only; several sources are measured separately."""

from __future__ import annotations

from itertools import combinations

import pytest

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from consumer.grpo.evaluation import measure


def group(*scores: float | None, source: str | None = None) -> RolloutGroup:
    states = [
        RolloutState(
            index=i,
            data_source=source,
            status=Status.COMPLETED,
            reward=None if score is None else {"score": score},
        )
        for i, score in enumerate(scores)
    ]
    return RolloutGroup("quiz-0000000000", "quiz", states)


def test_evaluate_counts_full_scores_as_right_and_missing_ones_as_wrong() -> None:
    metrics = measure([group(1.0), group(0.5, 1.0), group(None)])
    wanted = {
        "eval/accuracy": 0.5,
        "eval/score": pytest.approx(0.625),
        "eval/rollouts": 4.0,
        "eval/groups": 3.0,
    }
    assert metrics == wanted


def test_evaluate_separates_sources() -> None:
    metrics = measure([group(1.0, source="a"), group(0.0, source="b"), group(1.0, source="b")])
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert (metrics["eval/accuracy/a"], metrics["eval/accuracy/b"]) == (1.0, 0.5)


def test_pass_at_k_is_the_share_of_sets_of_k_with_a_right_one() -> None:
    groups = [group(1.0, 0.0, 0.0, 0.0, 0.0), group(1.0, 1.0, 0.5, 0.0), group(*[0.0] * 6)]
    metrics = measure(groups)
    for k in (1, 2, 4):
        shares = []
        for one in groups:
            sets = list(combinations(one.scores.tolist(), k))
            shares.append(sum(1.0 in chosen for chosen in sets) / len(sets))
        assert metrics[f"eval/pass@{k}"] == pytest.approx(sum(shares) / 3)
    assert metrics["eval/avg_pass@k"] == pytest.approx(
        sum(metrics[f"eval/pass@{k}"] for k in (1, 2, 4)) / 3
    )
    assert "eval/pass@8" not in metrics
