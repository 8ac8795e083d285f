from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams
from consumer.grpo.evaluation import measure, outcome
from consumer.handle.evaluation_round import Evaluated


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


def test_a_problem_without_an_answer_is_wrong_unless_it_is_left_out() -> None:
    answered = [group(1.0)] * 8 + [group(0.0)] * 3
    found = Evaluated(answered, {"quiz-0000000011": ""})
    metrics = outcome(found)
    assert metrics["eval/accuracy"] == pytest.approx(8 / 12)
    assert (metrics["eval/failed"], metrics["eval/groups"]) == (1, 11)
    assert outcome(found, leaves_out_failed=True)["eval/accuracy"] == pytest.approx(8 / 11)
    nobody = outcome(Evaluated([], {"quiz-0000000011": ""}))
    assert (nobody["eval/accuracy"], nobody["eval/failed"]) == (0.0, 1.0)
    assert "eval/accuracy" not in outcome(Evaluated([], {"q": ""}), leaves_out_failed=True)


def test_failed_problems_count_in_their_source() -> None:
    answered = [group(1.0, 1.0, source="a"), group(1.0, 0.0, source="b")]
    metrics = outcome(Evaluated(answered, {"1": "b", "2": "c", "3": ""}))
    assert metrics["eval/accuracy"] == pytest.approx(0.75 * 2 / 5)
    sources = [metrics[f"eval/accuracy/{source}"] for source in "abc"]
    assert sources == pytest.approx([1.0, 0.25, 0.0])
    assert metrics["eval/pass@2"] == pytest.approx(2 / 5)


def test_an_evaluation_says_which_weights_answered_and_how_they_were_sampled() -> None:
    states = [group(1.0).states[0] for _ in range(2)]
    for version, state in zip((4, 6), states, strict=True):
        state.append(
            np.array([5], "<i4"), np.array([-0.5], "<f4"), [VersionSpan(0, 1, version, "l")]
        )
        state.sample_params = SampleParams(temperature=0.5)
    found = [RolloutGroup(f"quiz-{n:010d}", "quiz", [state]) for n, state in enumerate(states)]
    metrics = outcome(Evaluated(found, {}))
    assert (metrics["eval/oldest_version"], metrics["eval/newest_version"]) == (4, 6)
    assert metrics["eval/temperature"] == 0.5
