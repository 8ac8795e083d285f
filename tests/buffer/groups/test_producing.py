"""enqueue, reissue, room, and the opening of a producer (I3, I7, I12, I13)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.control.control import Mode
from buffer.errors import Fenced, PayloadMissing, RoleHeld, WireError
from buffer.ids import group_id, new_nonce
from buffer.job import Job
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene, prompt


def test_enqueue_starts_no_more_than_there_is_room_for(scene: Scene) -> None:
    done = scene.enqueue(6, target=4)
    assert (done.count, done.cursor) == (4, 4)
    assert scene.stream("fresh") == [group_id("math", i) for i in range(4)]
    assert scene.raw.ttl(scene.keys.payload(group_id("math", 4), "init")) > 0
    assert scene.counters()["target"] == "4"
    assert scene.enqueue(3, target=4).count == 0
    scene.check()


def test_enqueue_counts_every_stage_in_which_a_group_may_still_become_a_result(
    scene: Scene,
) -> None:
    scene.open_trainer()
    scene.ready(0, 0)
    scene.take(1)
    scene.enqueue(3)
    scene.claim()
    # 1 consumed, 1 completed, 1 running, 2 waiting
    for target in (4, 5):
        assert scene.enqueue(1, target=target).count == 0
    assert scene.enqueue(9, target=7).count == 2
    scene.check()


def test_room_does_not_count_results_that_are_too_stale(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0, 0, 0)
    scene.take(1), scene.take(2)
    assert scene.enqueue(5, target=3).count == 1


def test_enqueue_moves_nothing_when_another_draw_was_expected(scene: Scene) -> None:
    scene.enqueue(2)
    before = scene.dump()
    answer = scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 1, [2], 1000)
    assert (answer.count, answer.cursor) == (0, 2)
    answer = scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 7, [2], 1000)
    assert (answer.count, answer.cursor) == (0, 2)
    assert scene.dump() == before


def test_enqueue_says_the_same_again_when_its_reply_was_lost(scene: Scene) -> None:
    scene.open_producer()
    operation = new_nonce()
    scene.run.payloads.write_prompts(
        {group_id("math", i): prompt(group_id("math", i)) for i in range(3)}
    )
    first = scene.run.jobs.enqueue(scene.producer, operation, "math", 0, [2, 2, 2], 2)
    before = scene.dump()
    scene.claim()
    again = scene.run.jobs.enqueue(scene.producer, operation, "math", 0, [2, 2, 2], 2)
    assert (first, before["progress:math"][b"cursor"]) == (again, b"2")
    assert scene.counters()["enqueued"] == "2"
    scene.check()


def test_enqueue_needs_the_prompts_bytes(scene: Scene) -> None:
    scene.open_producer()
    before = scene.dump()
    with pytest.raises(PayloadMissing, match=group_id("math", 0)):
        scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 0, [2], 10)
    assert scene.dump() == before


def test_enqueue_passes_over_draws_that_cannot_be_used(scene: Scene) -> None:
    done = scene.enqueue(0, samples=[0, 2, 0, 2, 0, 2], target=2)
    assert (done.count, done.cursor) == (2, 4)
    assert [scene.bit("dropped", i) for i in range(6)] == [1, 0, 1, 0, 0, 0]
    assert (scene.counters()["dropped"], scene.counters()["enqueued"]) == ("2", "4")
    scene.check()


def test_enqueue_does_not_repeat_draws_that_exist_or_ended_when_the_cursor_was_lost(
    scene: Scene,
) -> None:
    scene.open_trainer()
    scene.enqueue(4)
    for job, filtered in zip(scene.claim(2), (True, False), strict=True):
        scene.submit(job, filtered=filtered)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.raw.hset(
        scene.keys.progress("math"), mapping={"cursor": 0, "reentered": 4, "highest_draw": 4}
    )
    scene.raw.hset(scene.keys.cursors, "math", 0)
    done = scene.enqueue(5, target=1000)
    assert (done.count, done.cursor) == (1, 5)
    assert scene.stream("fresh") == [group_id("math", i) for i in (2, 3, 4)]
    scene.check()


def test_enqueue_without_any_target_starts_nothing(scene: Scene) -> None:
    assert scene.enqueue(2, task="quiz", target=None).count == 0


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


def test_old_producer_is_fenced(scene: Scene) -> None:
    old = scene.open_producer()
    with pytest.raises(RoleHeld, match="producer"):
        scene.open_producer()
    scene.open_producer(take_over=True)
    before = scene.dump()
    with pytest.raises(Fenced):
        scene.run.jobs.enqueue(old, new_nonce(), "math", 0, [], 10)
    with pytest.raises(Fenced):
        scene.run.jobs.reissue(old, "math", "aborted", 10)
    with pytest.raises(Fenced):
        scene.run.control.renew_role("producer", old)
    assert scene.dump() == before
    scene.run.control.renew_role("producer", scene.producer, closing=True)
    scene.open_producer()


def test_reissue_takes_the_oldest_first_and_never_more_than_the_room(scene: Scene) -> None:
    scene.enqueue(4)
    jobs = scene.claim(4)
    for job, version in zip(jobs, (3, 1, 2, None), strict=True):
        scene.submit(
            job, FIRST._replace(version=version) if version else None, status=Status.ABORTED
        )
    reissue = scene.run.jobs.reissue
    assert reissue(scene.producer, "math", "aborted", 1000, at_least=5) == 0
    assert reissue(scene.producer, "math", "aborted", 3, limit=2) == 2
    assert scene.stream("resume") == [jobs[1].gid, jobs[2].gid]
    assert reissue(scene.producer, "math", "aborted", 3) == 1
    assert reissue(scene.producer, "math", "aborted", 3) == 0
    assert scene.pool("aborted") == [(jobs[3].gid, float("inf"))]
    scene.check()


def test_prompts_never_change_once_stored(scene: Scene) -> None:
    gid = group_id("math", 0)
    scene.run.payloads.write_prompts({gid: b"first"})
    scene.run.payloads.write_prompts({gid: b"second"})
    assert scene.raw.get(scene.keys.payload(gid, "init")) == b"first"
    with pytest.raises(WireError, match="at most 1048000 can be stored"):
        scene.run.payloads.write_prompts({gid: bytes(1_048_001)})


def test_finish_closes_everything(scene: Scene) -> None:
    scene.pause(Mode.FINISH)
    assert scene.enqueue(1).refusal == "CLOSED"
    assert scene.run.control.state().mode is Mode.FINISH


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


def test_a_group_with_tokens_keeps_them_however_often_it_was_interrupted(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(tail_batch_max_tries=1)
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    assert interrupt(scene).aborts == 1
    assert (len(scene.pool("aborted")), len(scene.pool("expired"))) == (1, 0)
    assert scene.record(job.gid)["payload"] == job.token
    scene.check()


def test_evaluations_know_no_tail_batch(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(tail_batch_max_tries=1)
    scene.enqueue(1, task="quiz")
    interrupt(scene)
    assert len(scene.pool("aborted", "quiz")) == 1
