"""A long outage: all wait and log it once; no role is taken from one that could not renew it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from buffer.control.roles import HeldRole
from buffer.errors import ProducerGone
from buffer.ids import new_nonce
from buffer.model.manifest import NotReady
from buffer.redis.connection import retry as outage_clock
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from consumer.handle import wait_rules as batch_outlook
from consumer.handle.wait_rules import BatchOutlook
from tests.pipeline.yard import TASK, Yard

OUTAGE_S = 300.0


class Clock:
    """A monotonic clock that the test moves forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (outage_clock, batch_outlook):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_call_outlasts_its_deadline_while_there_is_patience_and_logs_it_once(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(own_server.url, deadline_s=0.1)
    asked = threading.Semaphore(0)

    def wait_on() -> bool:
        asked.release()
        return True

    def come_back() -> None:
        for _ in range(2):  # asked this often whether to wait longer
            asked.acquire(timeout=400)
        own_server.start()

    own_server.kill()
    store.patience = wait_on
    rescuer = threading.Thread(target=come_back)
    rescuer.start()
    with caplog.at_level(logging.INFO, "rolloutmq.store"):
        assert store.retrying("ping", lambda: store.control.ping())
    rescuer.join()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "server unreachable or full",
        "server back",
    ]


def silent_since_long(yard: Yard) -> Yard:
    """Return `yard` with a producer that was last seen in 1970."""
    yard.run.control.open_producer(new_nonce(), take_over=True)
    yard.run.store.control.hset(yard.run.keys.control, "producer_seen_ms", 1)
    return yard


def test_a_trainer_does_not_miss_a_producer_that_could_not_send_heartbeats(
    make_yard: Callable[..., Yard], clock: Clock
) -> None:
    yard = silent_since_long(make_yard())
    outlook = BatchOutlook(yard.run, 1, producer_timeout_s=5.0)
    answer = NotReady({TASK: (0, 1)})
    outlook.check(answer)
    clock.now += OUTAGE_S
    outlook.check(answer)
    for _ in range(4):
        clock.now += 1.0
        outlook.check(answer)
    clock.now += 1.0
    with pytest.raises(ProducerGone):
        outlook.check(answer)


class Stop(threading.Event):
    """An event whose waits move the clock forward by `seconds`."""

    def __init__(self, clock: Clock, seconds: Iterator[float]) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now += next(self._seconds)
        return False


def test_a_standby_gives_the_producer_time_for_a_heartbeat_after_an_outage(
    make_yard: Callable[..., Yard], clock: Clock
) -> None:
    yard = silent_since_long(make_yard(role_timeout_ms=400))
    waits = iter([OUTAGE_S, 0.0, 0.5])
    assert HeldRole(yard.run.control, "producer").wait_until_vacant(Stop(clock, waits))
    assert next(waits, None) is None
