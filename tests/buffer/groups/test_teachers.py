"""Completed groups that pass teachers before they are ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from buffer.control.control import Mode
from buffer.errors import Fenced, WireError
from buffer.job import EndedEarly
from buffer.limits import RunLimits, Straggler, TaskLimits
from buffer.run import Run
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import FIRST, Scene

BIG, SMALL = "big", "small"
TASKS = {"math": TaskLimits(teachers=[BIG, SMALL]), "quiz": TaskLimits(eval_of="math")}

MakeScene = Callable[..., Scene]


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    return make_scene(tasks=TASKS, max_tries=2)


def counts(scene: Scene) -> dict[str, int]:
    (task, _) = scene.run.account.totals().tasks
    return {name: number for name, number in task.stages.items() if number}


def test_a_group_passes_its_teachers_in_order_and_then_is_ready(scene: Scene) -> None:
    (gid,) = scene.sampled(BIG, SMALL)
    before = scene.counters()
    assert counts(scene) == {"waiting": 1}
    assert scene.stream("teach.big") == [gid]
    assert scene.claim() == []
    assert scene.claim_as(SMALL, worker="t1") == []
    scene.check()
    (job,) = scene.claim_as(BIG)
    assert (job.teacher, job.tries) == (BIG, 1)
    assert counts(scene) == {"running": 1}
    scene.check()
    scene.teach(job)
    scene.teach(job)  # a repeated submit
    assert scene.stream("teach.small") == [gid]
    (job,) = scene.claim_as(SMALL, worker="t1")
    scene.teach(job, "t1")
    assert counts(scene) == {"completed": 1}
    assert scene.pool("completed") == [(gid, 0.0)]
    group = scene.run.buffer.read(scene.payload(gid))
    assert sorted(group.head.teachers) == [BIG, SMALL]
    # what students made is counted once, and is theirs
    record, after = scene.record(gid), scene.counters()
    assert (record["owner"], record["tries"], int(record["arrival"])) == ("w0", "0", 1)
    assert after["running"] == after["teaching"] == "0"
    assert {**before, "running": "0", "teaching": "0"} == after
    scene.check()


def test_only_completed_groups_pass_teachers(scene: Scene) -> None:
    scene.sampled(BIG, status=Status.ABORTED)
    scene.sampled(BIG, filtered=True)
    assert counts(scene) == {"aborted": 1, "filtered": 1}
    assert scene.counters().get("teaching") is None
    scene.check()


def test_a_teacher_that_the_run_does_not_know_yet_is_left_out(scene: Scene) -> None:
    (gid,) = scene.sampled("new", BIG)
    assert (scene.stream("teach.big"), scene.record(gid)["teachers"]) == ([gid], "")


def test_a_teacher_may_add_columns_and_change_nothing_else(scene: Scene) -> None:
    (gid,) = scene.sampled(BIG)
    (job,) = scene.claim_as(BIG)
    group = scene.taught(job)
    states = group.states
    states[1].response_ids = np.array([5, 7], "<i4")
    with pytest.raises(WireError):
        scene.run.buffer.submit("t0", job, group.continued(states), 0)
    with pytest.raises(WireError):
        scene.submit(job, status=Status.ABORTED, worker="t0")
    assert scene.record(gid)["stage"] == "running"
    scene.teach(job)
    assert counts(scene) == {"completed": 1}
    scene.check()


def test_a_group_that_waits_for_a_teacher_takes_room(scene: Scene) -> None:
    scene.sampled(BIG, count=2)
    (job,) = scene.claim_as(BIG)
    assert scene.enqueue(5, target=4).count == 2
    scene.teach(job)
    assert scene.enqueue(5, target=4).count == 0
    progress = scene.run.read_progress().leftovers["math"]
    assert (progress.waiting, progress.completed) == (3, 1)


def test_a_killed_teacher_costs_nothing_but_its_work(scene: Scene) -> None:
    (gid,) = scene.sampled(BIG, SMALL)
    (lost,) = scene.claim_as(BIG)
    scene.expire_leases()
    scene.run.jobs.reap()
    assert scene.stream("teach.big") == [gid]
    scene.check()
    (job,) = scene.claim_as(BIG)
    with pytest.raises(Fenced):
        scene.teach(lost)
    scene.teach(job)
    (job,) = scene.claim_as(SMALL, worker="t1")
    assert job.tries == 2  # the lost lease used one up, the results none
    scene.teach(job, "t1")
    assert scene.record(gid)["owner"] == "w0"
    scene.check()


def test_a_group_that_dies_at_a_teacher_names_it_and_may_wait_for_it_again(scene: Scene) -> None:
    (gid,) = scene.sampled(BIG)
    for place in ("waiting", "dead"):
        (job,) = scene.claim_as(BIG)
        assert scene.run.jobs.release("t0", job, "failed", "OutOfMemory") == place
        assert not scene.run.dead_letters.keep_responses(job, scene.failed(job))
        scene.check()
    (letter,) = scene.run.dead_letters.newest()
    assert (letter.worker, letter.reason) == ("t0", "teacher big: OutOfMemory")
    assert scene.run.jobs.requeue(gid) == "dead"
    (job,) = scene.claim_as(BIG)
    scene.teach(job)
    assert counts(scene) == {"completed": 1}
    scene.check()


def test_a_teacher_that_always_fails_stops_its_task_though_students_succeed(
    make_scene: MakeScene,
) -> None:
    limits = TaskLimits(teachers=[BIG], max_consecutive_failures=4)
    scene = make_scene(tasks={"math": limits}, max_tries=2)
    for _ in range(2):
        scene.sampled(BIG)
        for _ in range(2):
            (job,) = scene.claim_as(BIG)
            scene.run.jobs.release("t0", job, "failed", "OutOfMemory")
    assert "teacher big" in scene.counters()["stopped"]
    scene.check()


def test_a_teacher_gives_back_a_group_as_it_was(scene: Scene) -> None:
    (gid,) = scene.sampled(BIG)
    for kind in ("handback", "aborted", "expired"):
        (job,) = scene.claim_as(BIG)
        ended = EndedEarly(tokens=4, unmade_tokens=0, oldest={FIRST.lineage: FIRST.version})
        assert scene.run.jobs.release("t0", job, kind, ended=ended) == "waiting"
        assert (scene.stream("teach.big"), scene.record(gid)["tries"]) == ([gid], "0")
        scene.check()


def train(scene: Scene, *steps: int) -> None:
    """Take one group of the newest version for each step."""
    for step in steps:
        weights = scene.run.control.state().weights
        scene.enqueue(1)
        (job,) = scene.claim(weights=weights)
        scene.submit(job, PolicyVersion("l1", step - 1))
        scene.take(step)


def waits(scene: Scene) -> None:
    assert scene.run.jobs.expire_waiting("math") == 1


def runs(scene: Scene) -> None:
    (job,) = scene.claim_as(BIG)
    assert scene.beat([job], "t0", oldest=FIRST).expiring == (job,)
    ended = EndedEarly(tokens=4, unmade_tokens=0, oldest={FIRST.lineage: FIRST.version})
    scene.run.jobs.release("t0", job, "expired", ended=ended)


@pytest.mark.parametrize("where", [waits, runs])
@pytest.mark.parametrize("on_straggler", ["drop", "retry"])
def test_a_group_that_becomes_too_old_at_a_teacher_expires(
    make_scene: MakeScene, where: Callable[[Scene], None], on_straggler: Straggler
) -> None:
    limits = TaskLimits(teachers=[BIG], on_straggler=on_straggler)
    scene = make_scene(tasks={"math": limits})
    scene.open_trainer()
    (gid,) = scene.sampled(BIG)
    assert scene.ages() == {gid: 0.0}
    train(scene, 1, 2)
    where(scene)
    assert counts_of(scene)["expired" if on_straggler == "retry" else "dropped"] == 1
    assert scene.counters()["teaching"] == "0"
    scene.check()
    if on_straggler == "retry":
        scene.run.jobs.reissue(scene.producer, "math", "expired", 1000)
        weights = scene.run.control.state().weights
        (job,) = scene.claim(weights=weights)
        assert (job.gid, job.is_begun, job.teacher) == (gid, False, "")
        scene.submit(job, PolicyVersion("l1", 2), teachers=[BIG])
        assert scene.stream("teach.big") == [gid]
        scene.check()


def counts_of(scene: Scene) -> dict[str, int]:
    return scene.run.account.totals().tasks[0].stages


def test_a_teacher_claims_while_weights_are_published_and_stops_at_the_users_pause(
    scene: Scene,
) -> None:
    scene.open_trainer()
    scene.sampled(BIG, count=3)
    scene.run.control.set_mode("trainer", Mode.ABORT, nonce=scene.trainer)
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 1), "/weights/1", "")
    (job,) = scene.claim_as(BIG)
    # a teacher is waited for by no pause
    assert scene.run.receipts.silent() == ["w0"]
    scene.pause(Mode.DRAIN)
    with pytest.raises(AssertionError):
        scene.claim_as(BIG)
    scene.teach(job)
    scene.run.control.set_mode("operator", Mode.RUN)
    assert len(scene.claim_as(BIG)) == 1
    scene.check()


def test_a_full_memory_does_not_stop_teachers(make_scene: MakeScene) -> None:
    scene = make_scene(tasks=TASKS, low_bytes=1, high_bytes=1)
    gids = scene.sampled(BIG)
    assert scene.claim_as(BIG)[0].gid == gids[0]


def test_an_operator_drops_a_group_at_a_teacher(scene: Scene) -> None:
    waiting, running = scene.sampled(BIG, count=2)
    (job,) = scene.claim_as(BIG)
    left = running if job.gid == waiting else waiting
    scene.run.jobs.drop(left)
    scene.run.jobs.drop(job.gid, revoke="t0")
    assert counts(scene) == {"dropped": 2}
    assert scene.counters()["teaching"] == "0"
    scene.check()


def test_groups_of_a_teacher_that_the_config_lacks_now_are_passed_on(make_scene: MakeScene) -> None:
    scene = make_scene(tasks=TASKS, order="fifo")
    scene.open_trainer(lineage="l0")
    (last,) = scene.sampled(SMALL, BIG)
    (ready,) = scene.sampled(BIG)
    before = scene.run.limits.model_copy(deep=True)
    wanted = RunLimits(**{**before.model_dump(), "tasks": {"math": TaskLimits(teachers=[SMALL])}})
    kept = wanted.keeping_tasks_of(before)
    assert kept.tasks["math"].former_teachers == [BIG]
    scene.run.limits.adopt(kept)
    scene.run.janitor.sweep()
    assert scene.pool("completed") == [(ready, 0.0)]
    assert scene.record(ready)["owner"] == "w0"
    (job,) = scene.claim_as(SMALL)
    scene.teach(job)
    assert scene.stream("teach.big") == [last]
    scene.run.janitor.sweep()
    scene.check()
    assert sorted(scene.take(1, math=2).gids) == [last, ready]
    scene.check()


def test_a_snapshot_has_the_groups_at_teachers(scene: Scene, tmp_path: Path) -> None:
    waiting, running = scene.sampled(BIG, count=2)
    scene.claim_as(BIG)
    scene.run.save(tmp_path / "run")
    copy = Run.restore(scene.store, tmp_path / "run", name=f"{scene.name}-copy")
    found = {record.gid for record in copy.groups.find({"stage": "waiting"})}
    assert found == {waiting, running}
    scene.run, scene.name, scene.keys = copy, copy.name, copy.keys
    scene.nonces.clear()
    assert sorted(scene.stream("teach.big")) == [waiting, running]
    assert counts(scene) == {"waiting": 2}
    scene.check()
    for job in scene.claim_as(BIG, 2):
        assert job.tries == 1
        scene.teach(job)
    assert counts(scene) == {"completed": 2}
    scene.check()
