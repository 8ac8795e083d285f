"""Groups that can serve no train step any more end while they run or wait (I8)."""

from __future__ import annotations

import pytest

from buffer.config.assignments import parse_settings
from buffer.errors import Fenced
from buffer.job import EndedEarly, Job
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import FIRST, Scene

SECOND = PolicyVersion("l1", 1)
TOKENS = EndedEarly(tokens=7, unmade_tokens=30, oldest={FIRST.lineage: FIRST.version})


def running(scene: Scene, count: int = 1, weights: PolicyVersion = FIRST) -> list[Job]:
    """Groups that run, with tokens of `weights`."""
    scene.enqueue(count)
    jobs = scene.claim(count, weights=scene.run.control.state().weights)
    scene.beat(jobs, oldest=weights)
    return jobs


def train(scene: Scene, *steps: int) -> None:
    for step in steps:
        weights = scene.run.control.state().weights
        scene.enqueue(1)
        (job,) = scene.claim(weights=weights)
        scene.submit(job, PolicyVersion("l1", step - 1))
        scene.take(step)


@pytest.fixture
def trained(scene: Scene) -> Scene:
    """A run with an open trainer and a threshold of 2 steps."""
    scene.open_trainer()
    return scene


def test_a_group_that_is_too_old_is_named_in_the_reply_to_a_heartbeat(trained: Scene) -> None:
    scene = trained
    old, fresh, empty = running(scene, 3)
    train(scene, 1)
    assert scene.beat([old, fresh, empty], oldest=FIRST).expiring == ()
    train(scene, 2)
    assert scene.beat([fresh], oldest=SECOND).expiring == ()
    assert scene.beat([empty]).expiring == ()
    reply = scene.beat([old], oldest=FIRST)
    assert (reply.expiring, reply.lost) == ((old,), ())
    scene.check()


def test_a_group_that_is_too_old_takes_no_room(trained: Scene) -> None:
    """Want 6: two are used, four run. Once the four are too old, four others are started."""
    scene = trained
    jobs = running(scene, 4)
    train(scene, 1)
    assert scene.enqueue(9, target=5).count == 0
    train(scene, 2)
    assert scene.run.read_progress().leftovers["math"].expiring == 4
    assert scene.enqueue(9, target=6).count == 4
    for job in jobs:
        assert scene.run.jobs.release("w0", job, "expired", "", TOKENS) == "dropped"
    assert scene.enqueue(9, target=6).count == 0
    assert scene.run.read_progress().leftovers["math"].expiring == 0
    counts = scene.run.read_progress().tasks["math"]
    assert (counts.ended_early, counts.discarded_tokens, counts.unmade_tokens) == (4, 28, 120)
    assert counts.expirations == 4
    scene.check()


@pytest.mark.parametrize(("on_straggler", "stage"), [("drop", "dropped"), ("retry", "pool")])
def test_an_ended_group_goes_where_the_settings_send_it(
    trained: Scene, on_straggler: str, stage: str
) -> None:
    scene = trained
    scene.run.set(parse_settings(LiveSettings, [f"on_straggler={on_straggler}"]))
    (begun,) = running(scene)
    scene.submit(begun, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    (job,) = scene.claim()
    assert job.gid == begun.gid
    train(scene, 1, 2)
    for _ in range(2):  # a call whose reply was lost is repeated
        assert scene.run.jobs.release("w0", job, "expired", "", TOKENS) == stage
    assert [gid for gid, _ in scene.pool("expired")] == (
        [job.gid] if on_straggler == "retry" else []
    )
    if on_straggler == "retry":
        record = scene.record(job.gid)
        assert (record["payload"], record["version"], record["tries"]) == ("init", "", "0")
        assert scene.run.jobs.reissue(scene.producer, "math", "expired", 1000) == 1
        assert scene.ages() == {}
        assert scene.run.buffer.read(scene.claim()[0].payload).oldest() is None
    scene.check()


def test_tokens_decide_whether_a_group_has_ended_early(trained: Scene) -> None:
    """A request that waited in its engine is younger than its worker knows before it returns."""
    scene = trained
    (job,) = running(scene)
    train(scene, 1, 2)
    assert scene.beat([job], oldest=FIRST).expiring == (job,)
    younger = EndedEarly(tokens=7, unmade_tokens=30, oldest={"l1": 2})
    assert scene.run.jobs.release("w0", job, "expired", "", younger) == "pool"
    assert [gid for gid, _ in scene.pool("aborted")] == [job.gid]
    assert scene.run.read_progress().tasks["math"].ended_early == 0
    scene.check()


def test_groups_that_became_too_old_in_the_queue_leave_it(trained: Scene) -> None:
    scene = trained
    scene.run.set(parse_settings(LiveSettings, ["on_straggler=retry"]))
    jobs = running(scene, 4)
    for job in jobs[:3]:
        scene.submit(job, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    assert len(scene.stream("resume")) == 3
    assert scene.run.janitor.sweep().expired == 0
    (young,) = running(scene, weights=PolicyVersion("l1", 5))
    train(scene, 1, 2)
    # the claim of `train` may have got one of them; the fourth runs, and is its worker's to end
    left = set(scene.stream("resume"))
    assert scene.run.janitor.sweep().expired == len(left)
    assert scene.stream("resume") == []
    assert {gid for gid, _ in scene.pool("expired")} == left
    assert scene.record(jobs[3].gid)["stage"] == scene.record(young.gid)["stage"] == "running"
    assert scene.run.janitor.sweep().expired == 0
    scene.check()


def test_many_that_run_do_not_hide_those_that_wait(trained: Scene) -> None:
    scene = trained
    jobs = running(scene, 6)
    scene.submit(jobs[5], status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    scene.raw.hset(scene.keys.ledger("train"), "taken", 2)
    assert scene.run.jobs.expire_waiting("math", 2) == 1


def test_groups_of_evaluations_do_not_age(trained: Scene) -> None:
    scene = trained
    scene.run.ledger.set_target(scene.trainer, "quiz", 0, 1)
    scene.enqueue(1, task="quiz", target=None)
    (job,) = scene.claim()
    train(scene, 1, 2)
    assert scene.beat([job], oldest=FIRST).expiring == ()
    assert scene.ages("quiz") == {}
    assert scene.run.jobs.release("w0", job, "expired", "", TOKENS) == "pool"
    scene.check()


@pytest.mark.parametrize("end", ["reap", "fence", "failed", "buried", "handback", "drop"])
def test_whatever_ends_a_running_group_leaves_no_age_behind(trained: Scene, end: str) -> None:
    """A worker that dies at any point between the report and the release, and all the others."""
    scene = trained
    (begun, fresh) = running(scene, 2)
    scene.submit(begun, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    (resumed,) = scene.claim()
    train(scene, 1, 2)
    jobs = [resumed, fresh]
    assert scene.beat(jobs, oldest=FIRST).expiring == (resumed, fresh)
    for job in jobs:
        match end:
            case "failed" | "handback":
                scene.run.jobs.release("w0", job, end)
            case "buried":
                scene.raw.hset(scene.keys.group(job.gid), "tries", 9)
                scene.run.jobs.release("w0", job, "failed")
            case "drop":
                scene.run.jobs.drop(job.gid, revoke="w0")
    if end == "reap":
        scene.expire_leases()
        scene.run.jobs.reap()
    if end == "fence":
        scene.run.fleet.fence("w0")
    scene.check()
    if end in ("reap", "fence"):
        with pytest.raises(Fenced):
            scene.run.jobs.release("w0", fresh, "expired", "", TOKENS)
    # what waits again keeps its tokens only as long as no one sweeps
    waits = [gid for gid in scene.stream("resume") if gid == resumed.gid]
    assert list(scene.ages()) == waits
    assert scene.run.janitor.sweep().expired == len(waits)
    assert scene.ages() == {}
    scene.check()
