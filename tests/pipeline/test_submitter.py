"""Finished groups that pile up while a submit is under way share the next round trip."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from buffer.errors import Fenced, ScriptError
from buffer.groups.submit import SubmitOutcome
from buffer.ids import new_nonce
from buffer.job import Job, Result
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from producer_workers.worker.submitter import Submitter
from tests.pipeline.yard import FIRST, TASK, Yard


class Trips:
    """Notes the sizes of the round trips of `yard`, and holds up the first one until `gate` is set.

    A round trip with the gid `poison` fails as a whole.
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
        if any(result.job.gid == self.poison for result in results):
            raise ScriptError("submit: broken")
        return self._submit(worker, results)


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
    """Begin to submit the first result, and all others while it is under way."""
    tasks = [asyncio.create_task(submitter.submit(results[0]))]
    while not trips.sizes:
        await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(submitter.submit(result)) for result in results[1:]]
    await asyncio.sleep(0.05)
    return tasks


def test_results_that_piled_up_travel_together(yard: Yard, trips: Trips) -> None:
    results = claim(yard, 40)

    async def scenario() -> None:
        tasks = await submit_during_first(Submitter(yard.run, "w0"), trips, results)
        tasks[39].cancel()
        trips.gate.set()
        await asyncio.gather(*tasks[:39])

    asyncio.run(scenario())
    assert trips.sizes == [1, 32, 6]
    assert yard.places() == {"completed": 39, "running": 1}


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
    assert trips.sizes == [1, 4, 1, 1, 1, 1]
    assert yard.places() == {"completed": 3, "waiting": 1, "running": 1}
