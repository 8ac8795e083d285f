from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer_workers.datasets.dataset import permute, place_of

ROWS = st.integers(1, 300)
SEEDS = st.integers(-(2**40), 2**40)


@given(rows=ROWS, epochs=st.integers(1, 4), seed=SEEDS, shuffle=st.booleans())
def test_order_visits_each_row_once_in_every_epoch(
    rows: int, epochs: int, seed: int, shuffle: bool
) -> None:
    places = [place_of(n, rows, seed, shuffle=shuffle) for n in range(rows * epochs)]
    for epoch in range(epochs):
        visited = places[epoch * rows : (epoch + 1) * rows]
        assert {place.epoch for place in visited} == {epoch}
        assert sorted(place.row for place in visited) == list(range(rows))


def test_order_is_that_of_the_file_when_not_shuffled() -> None:
    assert [place_of(n, 3, 7, shuffle=False) for n in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_order_differs_between_epochs_and_seeds() -> None:
    def rows_of(epoch: int, seed: int) -> list[int]:
        return [place_of(epoch * 1000 + n, 1000, seed).row for n in range(1000)]

    orders = [rows_of(0, 1), rows_of(1, 1), rows_of(0, 2), list(range(1000))]
    for place, order in enumerate(orders):
        for other in orders[:place]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 20


def test_order_puts_every_row_everywhere_over_many_epochs() -> None:
    counts = [[0] * 5 for _ in range(5)]
    for epoch in range(5000):
        for position in range(5):
            counts[position][place_of(epoch * 5 + position, 5, 3).row] += 1
    assert all(850 < count < 1150 for row in counts for count in row)


def test_order_is_the_one_that_running_runs_have() -> None:
    """Pinned: a change here would skip and double prompts of runs that are resumed."""
    assert [place_of(n, 10, 1).row for n in range(10)] == [7, 3, 9, 4, 0, 8, 1, 2, 6, 5]
    assert permute(123_456_789, 10**9, "1:0") == 452_048_651


@pytest.mark.parametrize(("draw", "rows"), [(-1, 5), (0, 0)])
def test_order_refuses_what_has_no_place(draw: int, rows: int) -> None:
    with pytest.raises(ValueError, match="draws start at 0"):
        place_of(draw, rows, 0)
