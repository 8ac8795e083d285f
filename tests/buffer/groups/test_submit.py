from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from buffer.errors import Fenced, RunDamaged, WireError
from buffer.groups.submit import Stored
from buffer.job import Result
from buffer.limits import TaskLimits
from buffer.redis import bulk_io
from buffer.wire import group_bytes
from buffer.wire.group import GROUP_TIME, RolloutGroup
from buffer.wire.rollout import PolicyVersion, Status
from producer_workers.worker.submitter import Submitter
from tests.buffer.scene import FIRST, Scene, extend


def finished(scene: Scene, count: int) -> list[Result]:
    scene.enqueue(count)
    jobs = scene.claim(count)
    groups = [extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST) for job in jobs]
    return [Result(job, group, 4) for job, group in zip(jobs, groups, strict=True)]


def test_groups_that_are_submitted_together_do_not_hold_up_each_other(scene: Scene) -> None:
    results = finished(scene, 40)
    scene.take_back(results[1].job.gid, results[35].job.gid)
    outcomes = scene.run.buffer.submit_many("w0", results)
    fenced = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Fenced)]
    assert fenced == [1, 35]
    assert outcomes[2:4] == [Stored(Status.COMPLETED, 2), Stored(Status.COMPLETED, 3)]
    scene.check()
    arrivals = [gid for gid, _ in scene.pool("completed")]
    assert arrivals == [r.job.gid for n, r in enumerate(results) if n not in (1, 35)]


def of_extra(result: Result, seconds: object) -> Result:
    states = result.group.states
    states[0].extra = {GROUP_TIME: seconds}
    return replace(result, group=RolloutGroup(result.group.gid, result.group.task, states))


def of_lineage(result: Result, lineage: str) -> Result:
    return replace(result, group=extend(result.group, Status.COMPLETED, PolicyVersion(lineage, 1)))


Spoil = Callable[[Result], Result]
FAULTS: dict[str, Spoil] = {
    **{
        f"{value} new tokens": partial(replace, new_tokens=value)
        for value in (-5, 10**13, 1.5, math.nan, None)
    },
    **{
        f"{value} seconds": partial(of_extra, seconds=value)
        for value in (-1.0, 1e300, math.nan, math.inf, "long", [1])
    },
    **{f"lineage {name!r}": partial(of_lineage, lineage=name) for name in ("", "a b", "a,b")},
    "another task": lambda result: replace(
        result, group=RolloutGroup(result.group.gid, "code", result.group.states)
    ),
    "another group": lambda result: replace(
        result, group=RolloutGroup("math-0000000099", "math", result.group.states)
    ),
    "no group id": lambda result: replace(result, job=replace(result.job, gid="x")),
    "no token": lambda result: replace(result, job=replace(result.job, token="a b")),
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS)
def test_a_result_that_is_refused_fails_alone(scene: Scene, spoil: Spoil) -> None:
    results = finished(scene, 3)
    gid = results[1].job.gid
    results[1] = spoil(results[1])
    first, second, third = scene.run.buffer.submit_many("w0", results)
    assert (first, third) == (Stored(Status.COMPLETED, 1), Stored(Status.COMPLETED, 2))
    assert isinstance(second, Exception)
    assert scene.record(gid)["stage"] == "running"
    scene.check()


def test_a_group_under_the_job_of_another_is_refused(scene: Scene) -> None:
    results = finished(scene, 3)
    swapped = [replace(results[n], group=results[1 - n].group) for n in (0, 1)]
    *wrong, right = scene.run.buffer.submit_many("w0", [*swapped, results[2]])
    assert right == Stored(Status.COMPLETED, 1)
    for outcome, result in zip(wrong, results, strict=False):
        assert isinstance(outcome, WireError)
        assert result.job.gid in str(outcome)
    assert [*map(type, scene.run.buffer.submit_many("w0", results[:2]))] == [Stored, Stored]
    scene.check()


@pytest.mark.without("cluster", "memory", reason="the raw client ends the others of one server")
def test_groups_are_prepared_once_and_stored_once_when_the_connection_breaks_between_them(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = finished(scene, 20)
    results[7].group.columns["spans"][0, 2] = 99
    prepared: list[str] = []
    prepare, transmit = group_bytes.pieces_each, bulk_io._transmit

    def noting(groups: Sequence[RolloutGroup]) -> list[list[bytes | memoryview] | Exception]:
        prepared.extend(group.gid for group in groups)
        return prepare(groups)

    def breaking(sock: Any, commands: Sequence[bulk_io.Command]) -> None:
        if len(commands) < len(results):  # a heartbeat of another store in this process
            return transmit(sock, commands)
        transmit(sock, commands[:15])
        scene.raw.client_kill_filter(_type="normal", skipme=True)
        monkeypatch.setattr(bulk_io, "_transmit", transmit)
        return transmit(sock, commands[15:])

    monkeypatch.setattr(group_bytes, "pieces_each", noting)
    monkeypatch.setattr(bulk_io, "_transmit", breaking)
    retries = scene.store.retries
    outcomes = scene.run.buffer.submit_many("w0", results)
    assert scene.store.retries > retries
    assert prepared == [result.job.gid for result in results]
    assert [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, Stored)] == [7]
    assert len(scene.pool("completed")) == 19
    scene.check()


def test_groups_of_several_tasks_and_sizes_keep_their_order(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.redis.payloads.BYTES_PER_TRIP", 1000)
    scene.enqueue(3)
    scene.enqueue(3, task="code")
    jobs = sorted(scene.claim(6), key=lambda job: job.gid[::-1])
    groups = [extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST) for job in jobs]
    results = [Result(job, group, 4) for job, group in zip(jobs, groups, strict=True)]
    outcomes = scene.run.buffer.submit_many("w0", results)
    assert [job.task for job in jobs] == ["code", "math"] * 3
    assert outcomes == [Stored(Status.COMPLETED, n) for n in (1, 1, 2, 2, 3, 3)]
    scene.check()


@pytest.mark.parametrize(("useless", "stops"), [("xx.", True), ("x.x", False), ("..xx", True)])
def test_filtered_groups_in_a_row_stop_a_task_within_one_call(
    make_scene: Callable[..., Scene], useless: str, stops: bool
) -> None:
    tasks = {"math": TaskLimits(max_consecutive_filtered=2)}
    scene = make_scene(tasks=tasks)
    results = [
        replace(result, filtered=mark == "x")
        for mark, result in zip(useless, finished(scene, len(useless)), strict=True)
    ]
    outcomes = scene.run.buffer.submit_many("w0", results)
    assert all(isinstance(outcome, Stored) for outcome in outcomes)
    assert scene.run.task_stops.of("math").is_stopped is stops
    assert int(scene.run.progress("math")["filtered"]) == useless.count("x")
    scene.check()


def test_a_damaged_record_fails_alone(scene: Scene) -> None:
    results = finished(scene, 3)
    damaged = scene.keys.group(results[1].job.gid)
    scene.raw.delete(damaged)
    scene.raw.rpush(damaged, "x")

    async def submit() -> list[object]:
        submitter = Submitter(scene.run, "w0")
        return await asyncio.gather(*map(submitter.submit, results), return_exceptions=True)

    first, second, third = asyncio.run(submit())
    assert isinstance(second, RunDamaged)
    assert (first, third) == (None, None)
    assert len(scene.pool("completed")) == 2
