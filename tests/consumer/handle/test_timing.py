"""The histogram of pauses."""

from __future__ import annotations

import pytest

from consumer.handle.timing import PauseTimes


def test_histogram_counts_every_pause_at_and_above_its_bound() -> None:
    times = PauseTimes()
    for seconds in (0.004, 0.01, 0.03, 400.0):
        times.add(seconds)
    metrics = times.metrics()
    assert [
        metrics[f"pause/le_{bound}"]
        for bound in ("0.0025", "0.005", "0.01", "0.025", "0.05", "300")
    ] == [*(0, 1, 2, 2, 3, 3)]
    assert metrics["pause/count"] == 4
    assert metrics["pause/p50_s"] == pytest.approx(0.03)
    assert metrics["pause/p99_s"] == pytest.approx(400.0)


def test_histogram_is_empty_before_the_first_pause() -> None:
    assert PauseTimes().metrics() == {}
