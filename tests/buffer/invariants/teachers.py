"""Teachers: a completed group passes them before it is ready, and stays what students made."""

from __future__ import annotations

import numpy as np
import pytest

from buffer.control.control import Mode
from buffer.errors import WireError
from buffer.job import Job
from buffer.wire.rollout import PolicyVersion
from tests.buffer.scene import Scene


def _one(scene: Scene, teacher: str, worker: str = "t0") -> Job:
    jobs = scene.claim_as(teacher, worker=worker)
    assert len(jobs) == 1
    return jobs[0]


def teachers_see_a_group_before_the_trainer(scene: Scene) -> None:
    """It passes them in order; what students made is theirs, and is counted once."""
    scene.open_trainer(lineage="l0")
    (gid,) = scene.sampled("big", "small")
    before = scene.counters()
    scene.try_take(1)
    assert scene.claim() == []
    scene.check()
    job = _one(scene, "big")
    scene.check()
    scene.teach(job)
    scene.teach(job)
    scene.check()
    last = _one(scene, "small", "t1")
    scene.teach(job)  # its reply was lost, and the next teacher is at work
    scene.teach(last, "t1")
    scene.teach(job)
    scene.check()
    assert {**before, "running": "0", "teaching": "0"} == scene.counters()
    assert (scene.record(gid)["owner"], scene.record(gid)["tries"]) == ("w0", "0")
    assert [*scene.take(1).gids] == [gid]


def teachers_add_columns_and_change_nothing(scene: Scene) -> None:
    scene.sampled("big")
    job = _one(scene, "big")
    group = scene.taught(job)
    states = group.states
    states[1].response_ids = np.array([5, 7], "<i4")
    with pytest.raises(WireError):
        scene.run.buffer.submit("t0", job, group.continued(states), 0)
    scene.teach(job)


def what_a_teacher_gives_back_waits_for_it(scene: Scene) -> None:
    """Handed back, lost, failed; dead, and put back by hand: its tokens stay."""
    (gid,) = scene.sampled("big")
    scene.run.jobs.release("t0", _one(scene, "big"), "aborted")
    assert scene.record(gid)["tries"] == "0"
    _one(scene, "big")
    scene.expire_leases("t0")
    scene.run.jobs.reap()
    for _ in range(2):
        assert scene.stream("teach.big") == [gid]
        scene.check()
        job = _one(scene, "big")
        scene.run.jobs.release("t0", job, "failed", "KeyError: 'x'")
    assert not scene.run.dead_letters.keep_responses(job, scene.failed(job))
    assert scene.run.jobs.requeue(gid) == "dead"
    scene.check()
    scene.teach(_one(scene, "big"))
    assert len(scene.pool("completed")) == 1


def groups_that_wait_for_a_teacher_take_room(scene: Scene) -> None:
    """And leave it as any others do: dropped, or too old."""
    scene.open_trainer()
    dropped, _ = scene.sampled("big", count=2)
    assert scene.enqueue(5, target=3).count == 1
    assert scene.run.jobs.drop(dropped) == "waiting"
    scene.check()
    for step in (1, 2):
        (job,) = scene.claim(weights=scene.run.control.state().weights)
        scene.submit(job, PolicyVersion("l1", step - 1))
        scene.take(step)
        scene.enqueue(1)
    assert scene.run.jobs.expire_waiting("math") == 1
    assert scene.stream("teach.big") == []
    scene.check()


def only_an_operator_stops_teachers(scene: Scene) -> None:
    """Neither does memory that is full, nor new weights, which do not wait for them."""
    scene.open_trainer()
    scene.sampled("big", count=3)
    scene.run.control.set_mode("trainer", Mode.ABORT, nonce=scene.trainer)
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 1), "/weights/1", "")
    _one(scene, "big")
    _one(scene, "big")
    assert scene.run.receipts.silent() == ["w0"]
    scene.pause(Mode.DRAIN)
    assert scene.claim_of("t0", 1).refusal == "PAUSED"


def teachers_that_fail_stop_their_task(scene: Scene) -> None:
    """Though students succeed between two failures."""
    for _ in range(2):
        scene.sampled("big")
        scene.run.jobs.release("t0", _one(scene, "big"), "failed", "KeyError: 'x'")
    assert "teacher big" in scene.counters().get("stopped", "")
