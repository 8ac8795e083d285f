from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from buffer.control.control import Work
from buffer.errors import Fenced, NoBatch, ProducerGone, ScriptError
from buffer.groups.submit import SubmitOutcome
from buffer.ids import new_nonce
from buffer.job import Job, Result
from buffer.manifest import NotReady
from buffer.redis import retry as outage_clock
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from consumer.handle import wait_rules as batch_outlook
from consumer.handle.wait_rules import BatchOutlook
from producer_workers.worker.submitter import Submitter
from tests.pipeline.yard import FIRST, TASK, Yard

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
        assert store.retrying("ping", lambda: store.client.ping())
    rescuer.join()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "server unreachable or full",
        "server back",
    ]


def silent_since_long(yard: Yard) -> Yard:
    """Return `yard` with a producer that was last seen in 1970."""
    yard.run.control.open_producer(new_nonce(), take_over=True)
    yard.run.store.client.hset(yard.run.keys.control, "producer_seen_ms", 1)
    return yard


def test_a_trainer_does_not_miss_a_producer_that_could_not_send_heartbeats(
    make_yard: Callable[..., Yard], clock: Clock
) -> None:
    yard = silent_since_long(make_yard())
    outlook = BatchOutlook(yard.run, 1, producer_timeout_s=5.0, work=Work())
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


def test_a_producer_in_place_of_another_has_a_whole_round_before_a_batch_is_given_up(
    make_yard: Callable[..., Yard], clock: Clock
) -> None:
    yard = make_yard()
    outlook = BatchOutlook(yard.run, 1, producer_timeout_s=None, work=Work())

    def look(nonce: str, turns: int) -> None:
        work = Work()
        work.turns = turns
        yard.run.control.renew_role("producer", nonce, work=work)
        clock.now += 1.0
        outlook.check(NotReady({TASK: (0, 1)}))

    look(yard.producer, 6)
    look(yard.producer, 7)
    other = new_nonce()
    yard.run.control.open_producer(other, take_over=True)
    look(other, 0)
    look(other, 1)  # its first round, which draws the prompts
    with pytest.raises(NoBatch):
        look(other, 2)


class Stop(threading.Event):
    """An event whose waits move the clock forward by `seconds`."""

    def __init__(self, clock: Clock, seconds: Iterator[float]) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now += next(self._seconds)
        return False


# -- submitter ------------------------------


class Trips:
    """Notes the sizes of the round trips of `yard`, and holds up the first one until `gate` is set.

    The result of the gid `poison` has a number that the server refuses.
    """

    def __init__(self, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.poison = ""
        self._submit = yard.run.buffer.submit_many
        monkeypatch.setattr(yard.run.buffer, "submit_many", self.submit_many)

    def submit_many(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        self.sizes.append(len(results))
        assert self.gate.wait(400)
        spoilt = [
            replace(result, new_tokens=-1) if result.job.gid == self.poison else result
            for result in results
        ]
        return self._submit(worker, spoilt)


@pytest.fixture
def trips(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Trips:
    return Trips(yard, monkeypatch)


def claim(yard: Yard, groups: int) -> list[Result]:
    """Results of groups that worker `w0` holds."""
    yard.enqueue(groups)
    nonce = new_nonce()
    yard.run.fleet.register("w0", nonce, {})
    jobs: list[Job] = []
    while len(jobs) < groups:
        jobs += yard.run.jobs.claim("w0", nonce, new_nonce(), FIRST, groups).jobs
    return [Result(job, finished(yard, job), 2) for job in jobs]


def finished(yard: Yard, job: Job) -> RolloutGroup:
    states: list[RolloutState] = yard.run.buffer.read(job.payload).states
    for state in states:
        span = VersionSpan(0, 1, FIRST.version, FIRST.lineage)
        state.append(np.array([1]), np.array([-0.5]), (span,))
        state.finish_reason = "stop"
        state.reward = {"score": 1.0}
        state.status = Status.COMPLETED
    return RolloutGroup(job.gid, TASK, states)


async def submit_during_first(
    submitter: Submitter, trips: Trips, results: Sequence[Result]
) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(submitter.submit(results[0]))]
    while not trips.sizes:
        await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(submitter.submit(result)) for result in results[1:]]
    await asyncio.sleep(0.05)
    return tasks


async def test_results_that_piled_up_travel_together(yard: Yard, trips: Trips) -> None:
    results = claim(yard, 40)
    tasks = await submit_during_first(Submitter(yard.run, "w0"), trips, results)
    tasks[39].cancel()
    trips.gate.set()
    await asyncio.gather(*tasks[:39])
    assert trips.sizes == [1, 32, 6]
    assert yard.stages() == {"completed": 39, "running": 1}


def test_each_group_has_its_own_outcome(yard: Yard, trips: Trips) -> None:
    results = claim(yard, 5)
    yard.run.jobs.release("w0", results[2].job, "handback")
    trips.poison = results[3].job.gid

    async def scenario() -> list[Any]:
        tasks = await submit_during_first(Submitter(yard.run, "w0"), trips, results)
        trips.gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = [type(outcome) for outcome in asyncio.run(scenario())]
    assert outcomes == [type(None), type(None), Fenced, ScriptError, type(None)]
    assert trips.sizes == [1, 4]
    assert yard.stages() == {"completed": 3, "waiting": 1, "running": 1}
