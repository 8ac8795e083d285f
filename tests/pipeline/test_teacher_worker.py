"""The worker of a teacher in this process: what it fails at, and what it leaves, goes to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from buffer.limits import TaskLimits
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.teacher import TeacherSection
from producer_workers.engines.base import EngineDeadError
from producer_workers.worker.teacher import Teacher
from producer_workers.worker.worker import Worker
from tests.pipeline.yard import FIRST, TASK, WatchedEngine, Yard

TEACHERS = {"big": TeacherSection(top_k=2), "other": TeacherSection(sources=["none"])}


@pytest.fixture
def yard(make_yard: Callable[..., Yard]) -> Yard:
    return make_yard(tasks={TASK: TaskLimits(teachers=["big"])})


def teacher(yard: Yard, name: str = "t0", *, score_s: float = 0.0, **engine: Any) -> Worker:
    config = SimulatedConfig(first_token_s=Fixed(value=score_s), vocab_size=100, **engine)
    worker = Worker(
        yard.run,
        WatchedEngine(config, FIRST),
        {},
        worker_id=name,
        facts={"teaches": "big"},
        drain_timeout_s=0.0,
        teacher=Teacher("big", {TASK: 2}, vocabulary=100),
    )
    worker.engine = worker._engine._engine  # type: ignore[attr-defined]
    return worker


async def sampled(yard: Yard, groups: int = 1) -> list[str]:
    """Return groups that a worker has sampled, and that wait for their teacher."""
    gids = yard.enqueue(groups)
    async with yard.working(yard.worker(teachers=TEACHERS)):
        await yard.until_places(waiting=groups)
        await yard.until(lambda: all(r.get("lane") == "teach.big" for r in yard.records()))
    return gids


def test_a_group_that_cannot_be_scored_is_dead_with_the_cause_and_may_be_scored_again(
    yard: Yard,
) -> None:
    async def scenario() -> str:
        (gid,) = await sampled(yard)
        async with yard.working(teacher(yard, fail_every=2)):
            await yard.until_places(dead=1)
        reason = yard.run.dead_letters.reason(gid)["reason"]
        assert "teacher big" in reason
        assert "fail_every" in reason
        yard.run.jobs.requeue(gid)
        async with yard.working(teacher(yard, "t1")):
            await yard.until_places(completed=1)
        return gid

    group = yard.group(asyncio.run(scenario()))
    for state in group.states:
        assert state.teacher_logprobs is not None
        assert state.teacher_top_ids is not None
        assert state.teacher_logprobs.keys() == {"big"}
        assert state.teacher_top_ids["big"].shape == (len(state.response_ids), 2)
    yard.check()


def test_an_engine_that_dies_ends_its_teacher_and_loses_no_group(yard: Yard) -> None:
    async def scenario() -> None:
        await sampled(yard, groups=2)
        dying = teacher(yard, die_after=1)
        await dying.engine.start()  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError):
            await dying.run()
        assert yard.places() == {"waiting": 2}
        async with yard.working(teacher(yard, "t1")):
            await yard.until_places(completed=2)

    asyncio.run(scenario())
    yard.check()


def test_a_teacher_that_leaves_hands_its_groups_back_without_a_lost_try(yard: Yard) -> None:
    async def scenario() -> None:
        await sampled(yard)
        async with yard.working(teacher(yard, score_s=300.0)):
            await yard.until_places(running=1)
        await yard.until_places(waiting=1)

    asyncio.run(scenario())
    (record,) = yard.records()
    assert (record["lane"], record["tries"]) == ("teach.big", "0")
    yard.check()
