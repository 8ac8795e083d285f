"""A worker that alone is broken slows down, so that the others get the groups."""

from __future__ import annotations

from producer_workers.worker.claims import FREE_FAILURES, LONGEST_S, FailureBackoff


def test_pauses_grow_with_the_failures_and_end_with_a_success() -> None:
    backoff = FailureBackoff()
    for _ in range(FREE_FAILURES):
        backoff.failed(100.0)
        assert not backoff.must_pause(100.0)
    backoff.failed(100.0)
    assert backoff.must_pause(101.0)
    assert not backoff.must_pause(102.0)
    for _ in range(10_000):
        backoff.failed(200.0)
    assert backoff.must_pause(200.0 + LONGEST_S - 0.1)
    assert not backoff.must_pause(200.0 + LONGEST_S)
    backoff.succeeded()
    assert not backoff.must_pause(200.0)
