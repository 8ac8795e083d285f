from __future__ import annotations

import logging

import pytest

from buffer.redis.retry import Backoff, LogOnce, OutageClock, OutageLog


def test_pauses_double_up_to_the_longest_without_jitter() -> None:
    backoff = Backoff(0.5, 10.0, jitter=0.0)
    assert [backoff.pause_s(attempt) for attempt in (0, 1, 4, 5, 5000)] == [
        0.5, 1.0, 8.0, 10.0, 10.0,
    ]  # fmt: skip


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_jitter_is_the_random_share_of_a_pause(jitter: float) -> None:
    pauses = [Backoff(1.0, 4.0, jitter).pause_s(1) for _ in range(500)]
    assert 2.0 * (1.0 - jitter) <= min(pauses) < max(pauses) <= 2.0
    assert max(pauses) - min(pauses) > jitter


def test_reason_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    state = LogOnce(logging.getLogger("test"), "claiming nothing")
    for reason in ("", "paused", "paused", "full", "", "", "full"):
        state.report(reason)
    assert caplog.messages == [f"claiming nothing: {word}" for word in ("paused", "full", "full")]


def test_outages_are_logged_once_each_and_end_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outages = OutageLog()
    for operation in ("claim", "submit"):
        outages.failed(operation, "refused", is_full=False)
    assert caplog.messages == ["server unreachable or full: refused, during claim; waiting for it"]
    outages.worked("heartbeat")
    outages.failed("enqueue", "full", is_full=True)
    # a full server answers most calls: only the refused operation shows that it accepts work again
    outages.worked("heartbeat")
    assert caplog.messages[1:] == [
        "server back",
        "server unreachable or full: full, during enqueue; waiting for it",
    ]
    outages.worked("enqueue")
    outages.worked("enqueue")
    assert caplog.messages[3:] == ["server back"]


def test_outage_restarts_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("buffer.redis.retry.time.monotonic", lambda: now)
    clock = OutageClock()
    now = 102.0
    assert (clock.poll(), clock.had_outage) == (2.0, False)
    now = 110.0
    assert (clock.poll(), clock.had_outage) == (0.0, True)
    now = 111.0
    assert (clock.poll(), clock.had_outage) == (1.0, True)
