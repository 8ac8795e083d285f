from __future__ import annotations

import pytest

from buffer.control.worker_record import Histogram, parse_counts

BOUNDS_S = (0.1, 1.0, 10.0)


def test_a_duration_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    times = Histogram(BOUNDS_S)
    for seconds in (0.0, 0.1, 0.11, 10.0, 99.0):
        times.add(seconds)
    assert times.counts == (2, 1, 1, 1)
    assert times.at_most() == {0.1: 2, 1.0: 3, 10.0: 4}
    assert times.count == 5
    assert times.total_s == pytest.approx(109.21)


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        ((0, 0, 0, 0), 0.5, 0.0), ((4, 0, 0, 0), 0.5, 0.05), ((2, 2, 0, 0), 0.5, 0.1),
        ((2, 2, 0, 0), 0.75, 0.55), ((0, 0, 1, 0), 1.0, 10.0), ((1, 0, 0, 9), 0.99, 10.0),
    ],
)  # fmt: skip
def test_quantiles_are_interpolated_within_a_bucket(
    counts: tuple[int, ...], share: float, seconds: float
) -> None:
    assert Histogram(BOUNDS_S, counts).quantile_s(share) == pytest.approx(seconds)


def test_counts_by_other_bounds_are_ignored() -> None:
    assert Histogram(BOUNDS_S, (1, 2, 3), total_s=4.0).count == 0
    assert Histogram(BOUNDS_S, (1, 2, 3), total_s=4.0).total_s == 0.0


@pytest.mark.parametrize("text", ["1 x", "-1", "1.5", "²", "1" * 16])
def test_text_that_is_no_list_of_counts_is_none(text: str) -> None:
    assert parse_counts(text) is None
