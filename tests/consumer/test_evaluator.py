"""Accuracy counts full scores only; sources are told apart where there are several."""

from __future__ import annotations

import pytest

from buffer import RolloutGroup, RolloutState, Status
from consumer.evaluator import Evaluator


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
    metrics = Evaluator().evaluate([group(1.0), group(0.5, 1.0), group(None)])
    assert metrics == {"eval/accuracy": 0.5, "eval/score": pytest.approx(0.625), "eval/rollouts": 4.0}


def test_evaluate_tells_sources_apart() -> None:
    metrics = Evaluator().evaluate([group(1.0, source="a"), group(0.0, source="b"), group(1.0, source="b")])
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert (metrics["eval/accuracy/a"], metrics["eval/accuracy/b"]) == (1.0, 0.5)
