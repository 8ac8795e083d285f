from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from producer_workers.engines.base import EngineLoad
from producer_workers.worker.claims import (
    FREE_FAILURES,
    LONGEST_S,
    QUEUED_POLLS,
    AdaptiveConcurrency,
    FailureBackoff,
)
from tests.thoroughness import examples


class Fleet:
    """An engine with `places` slots, a queue behind it, and groups of `k` that end at random."""

    def __init__(self, places: int, k: int, controller: AdaptiveConcurrency) -> None:
        self.places = places
        self.k = k
        self.controller = controller
        self.held = 0

    def step(self, ended: int) -> EngineLoad:
        self.held -= min(ended, self.held)
        self.held += max(0, self.controller.limit - self.held)
        requests = self.held * self.k
        running = min(self.places, requests)
        load = EngineLoad(running, requests - running, 0.0)
        self.controller.observe(load, self.held)
        return load


@settings(max_examples=examples(100))
@given(
    places=st.integers(8, 600),
    k=st.integers(1, 8),
    start=st.integers(1, 1024),
    ends=st.lists(st.integers(1, 40), min_size=1),
)
def test_engine_is_full_and_hardly_queues_wherever_the_search_begins(
    places: int, k: int, start: int, ends: list[int]
) -> None:
    fleet = Fleet(places, k, AdaptiveConcurrency(start))
    for poll in range(1600):  # at one group a poll it must first end 1,024 of them
        fleet.step(ends[poll % len(ends)])
    seen = [fleet.step(ends[poll % len(ends)]) for poll in range(60)]
    width = max(1, places // k)
    assert (
        min(load.running for load in seen) >= min(places, (width - 1) * k) * 0.9 or places < 2 * k
    )
    # a group or two more than fit, while it looks whether there is room
    assert sum(load.waiting for load in seen) / len(seen) <= 2 * k + 1
    assert 1 <= fleet.controller.limit <= 1024


@given(
    st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 900), st.floats(0, 1), st.integers(0, 1100)),
        max_size=60,
    ),
    st.integers(1, 50),
    st.integers(50, 200),
)
def test_limit_stays_in_its_bounds_whatever_an_engine_says(
    polls: list[tuple[int, int, float, int]], least: int, most: int
) -> None:
    controller = AdaptiveConcurrency(50, least, most)
    for running, waiting, kv_usage, held in polls:
        assert least <= controller.observe(EngineLoad(running, waiting, kv_usage), held) <= most


def test_what_is_not_used_up_is_not_raised() -> None:
    controller = AdaptiveConcurrency(8)
    for _ in range(20):
        controller.observe(EngineLoad(10, 0, 0.1), held=7)
    assert controller.limit == 8
    assert [controller.observe(EngineLoad(64, 0, 0.1), held) for held in (8, 16, 32)] == [
        16,
        32,
        64,
    ]


def test_a_moments_queue_is_no_reason_and_a_full_cache_is_one() -> None:
    controller = AdaptiveConcurrency(64)
    for _ in range(10):
        controller.observe(EngineLoad(512, 40, 0.5), held=64)
        controller.observe(EngineLoad(512, 0, 0.5), held=40)
    assert controller.limit == 64
    for _ in range(QUEUED_POLLS):
        controller.observe(EngineLoad(512, 0, 0.97), held=64)
    assert controller.limit == 56


def test_a_decrease_has_its_effect_before_the_next_one() -> None:
    """32 of 64 groups queue: the limit is halved once, and waits until that many have ended."""
    controller = AdaptiveConcurrency(64)
    for held in (64, 64, 63, 60, 50, 40, 33):
        controller.observe(EngineLoad(256, 8 * held - 256, 0.5), held)
    assert controller.limit == 32


# -- failure backoff ------------------------------


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
