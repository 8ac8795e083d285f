"""Advantages against a literal transcription of the papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import WireError
from consumer.advantages import dr_grpo_advantages, estimate_advantages, grpo_advantages

SCORE = st.floats(-10, 10, width=32)
GROUPS = st.lists(st.lists(SCORE, min_size=1, max_size=9), min_size=1, max_size=5)


def column(*scores: float) -> np.ndarray:
    return np.array(scores, np.float32)


@given(GROUPS)
def test_grpo_equals_the_paper_for_ragged_groups(groups: list[list[float]]) -> None:
    expected = []
    for scores in groups:
        mean = sum(scores) / len(scores)
        equal = len(set(scores)) == 1
        std = 0.0 if equal else (sum((r - mean) ** 2 for r in scores) / (len(scores) - 1)) ** 0.5
        expected += [0.0 if equal else (r - mean) / (std + 1e-6) for r in scores]
    got = grpo_advantages([column(*scores) for scores in groups])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@given(GROUPS)
def test_dr_grpo_equals_the_paper_for_ragged_groups(groups: list[list[float]]) -> None:
    expected = [r - sum(scores) / len(scores) for scores in groups for r in scores]
    got = dr_grpo_advantages([column(*scores) for scores in groups])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("scores", [[0.1] * 7, [1.0], [-3.3] * 3])
def test_advantages_are_exactly_zero_where_scores_are_equal(estimator: str, scores: list[float]) -> None:
    got = estimate_advantages(estimator, [column(*scores)])  # type: ignore[arg-type]
    assert (got == 0).all()


def test_grpo_does_not_mix_groups_when_their_scores_differ() -> None:
    alone = grpo_advantages([column(0, 1, 1)])
    together = grpo_advantages([column(100, 101), column(0, 1, 1), column(7)])
    assert (together[2:5] == alone).all()


def test_advantages_refuse_a_group_when_a_score_is_missing() -> None:
    with pytest.raises(WireError, match="group 1"):
        grpo_advantages([column(0, 1), column(0, float("nan"))])


def test_advantages_are_empty_for_an_empty_batch() -> None:
    assert grpo_advantages([]).shape == (0,)
