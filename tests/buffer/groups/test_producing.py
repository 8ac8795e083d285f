"""enqueue, reissue, room, and the opening of a producer (I3, I7, I12, I13)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import WireError
from buffer.ids import group_id
from buffer.job import Job
from tests.buffer.scene import Scene


def test_enqueue_passes_over_draws_that_cannot_be_used(scene: Scene) -> None:
    done = scene.enqueue(0, samples=[0, 2, 0, 2, 0, 2], target=2)
    assert (done.count, done.cursor) == (2, 4)
    assert [scene.bit("dropped", i) for i in range(6)] == [1, 0, 1, 0, 0, 0]
    assert (scene.counters()["dropped"], scene.counters()["enqueued"]) == ("2", "4")
    scene.check()


def test_closed_lanes_take_no_new_work(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.run.jobs.release("w0", job, "aborted")
    scene.pause(lanes="eval")
    before = scene.dump()
    assert scene.enqueue(1).refusal == "CLOSED"
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 0
    after = scene.dump()
    assert {name for name in after if after[name] != before.get(name)} <= {
        "payload:math-0000000001:init"
    }
    assert scene.enqueue(1, task="quiz").count == 1


def test_aborted_evaluations_wait_again_while_training_is_paused(scene: Scene) -> None:
    scene.enqueue(1, task="quiz")
    (job,) = scene.claim()
    scene.run.jobs.release("w0", job, "aborted")
    scene.pause(lanes="eval")
    assert scene.run.jobs.reissue(scene.producer, "quiz", "aborted", None) == 1
    assert [j.gid for j in scene.claim()] == [job.gid]
    scene.check()


def test_prompts_never_change_once_stored(scene: Scene) -> None:
    gid = group_id("math", 0)
    scene.run.payloads.write_prompts({gid: b"first"})
    scene.run.payloads.write_prompts({gid: b"second"})
    assert scene.raw.get(scene.keys.payload(gid, "init")) == b"first"
    with pytest.raises(WireError, match="at most 1048000 can be stored"):
        scene.run.payloads.write_prompts({gid: bytes(1_048_001)})


def interrupt(scene: Scene) -> Job:
    """Claim the one group that waits, and release it as a pause does."""
    (job,) = scene.claim()
    scene.run.jobs.release("w0", job, "aborted")
    return job


def test_a_group_interrupted_too_often_waits_with_the_expired_ones(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(tail_batch_max_tries=2)
    scene.enqueue(1)
    reissue = scene.run.jobs.reissue
    assert interrupt(scene).aborts == 0
    assert (len(scene.pool("aborted")), len(scene.pool("expired"))) == (1, 0)
    reissue(scene.producer, "math", "aborted", 1000)
    assert interrupt(scene).aborts == 1
    assert (len(scene.pool("aborted")), len(scene.pool("expired"))) == (0, 1)
    # it does not age there, counts towards the trigger, and says at its next claim how often it was
    # interrupted
    scene.run.buffer.refresh_staleness("math")
    assert reissue(scene.producer, "math", "expired", 1000, at_least=2) == 0
    assert reissue(scene.producer, "math", "expired", 1000, at_least=1) == 1
    (job,) = scene.claim()
    assert (job.aborts, job.tries) == (2, 1)
    scene.submit(job)
    assert scene.run.account.totals().clean
    scene.check()


def test_evaluations_know_no_tail_batch(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(tail_batch_max_tries=1)
    scene.enqueue(1, task="quiz")
    interrupt(scene)
    assert len(scene.pool("aborted", "quiz")) == 1
