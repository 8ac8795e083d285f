"""Pools are read, and taken from without a trainer process; no count relies on expiry (I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import ConfigError, GroupHeld, PayloadMissing, QueryError, WireError
from buffer.groups.replay_buffer import PoolSizes
from buffer.ids import group_id
from buffer.job import Job
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene

Make = Callable[..., Scene]


def gids(groups: list[RolloutGroup]) -> list[str]:
    return [group.gid for group in groups]


def pass_steps(scene: Scene, taken: int) -> None:
    """Set the last step taken, without its batches."""
    scene.raw.hset(scene.keys.ledger("train"), "taken", taken)


def test_counts_are_of_the_next_step_whether_or_not_anything_was_expired(make_scene: Make) -> None:
    scene = make_scene(on_straggler="retry")
    scene.ready(0, 0, 3)
    scene.ready(0, task="code")
    scene.enqueue(1)
    scene.submit(scene.claim()[0], status=Status.ABORTED)
    buffer = scene.run.buffer
    assert buffer.count_statuses("math", "code") == {
        "math": PoolSizes(3, 1, 0, 0),
        "code": PoolSizes(1, 0, 0, 0),
    }
    pass_steps(scene, 2)
    assert buffer.count_statuses() == {
        "math": PoolSizes(1, 0, 0, 3),
        "code": PoolSizes(0, 0, 0, 1),
        "quiz": PoolSizes(0, 0, 0, 0),
    }
    assert buffer.refresh_staleness() == {"math": 3, "code": 1}
    assert buffer.count_statuses("math") == {"math": PoolSizes(1, 0, 3, 0)}
    assert [buffer.count("math", status) for status in ("completed", "aborted", "expired")] == [
        1,
        0,
        3,
    ]
    assert buffer.refresh_staleness() == {"math": 0, "code": 0}


def test_ready_is_what_the_next_step_can_take(make_scene: Make) -> None:
    scene = make_scene()
    scene.open_trainer()
    scene.ready(0, 3, lineage="l1")
    scene.ready(3, task="code", lineage="l1")
    ready = scene.run.buffer.is_ready
    assert ready({"math": 2, "code": 1})
    assert not ready({"math": 2, "code": 2})
    assert ready({})
    assert ready({"math": 0, "code": -1})
    pass_steps(scene, 2)
    assert (ready({"math": 1}), ready({"math": 2})) == (True, False)
    with pytest.raises(ConfigError, match="no task 'maths'"):
        ready({"maths": 1})
    with pytest.raises(ConfigError, match="no pool of 'init' groups"):
        scene.run.buffer.count("math", "init")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["staleness", "fifo"])
def test_get_reads_in_the_order_of_the_policy_and_takes_nothing(
    make_scene: Make, order: str
) -> None:
    scene = make_scene(order=order, stale_threshold=4)
    scene.open_trainer()
    made = dict(zip((2, 0, 1, 2), scene.ready(2, 0, 1, 2, lineage="l1"), strict=False))
    buffer = scene.run.buffer
    before = scene.dump()
    chosen = gids(buffer.get(3, "math"))
    assert gids(buffer.get(9, "math"))[:3] == chosen
    if order == "staleness":
        assert chosen[:2] == [made[0], made[1]]
    assert scene.dump() == before
    assert scene.take(1, math=3).gids == chosen
    pass_steps(scene, 5)
    left = [oldest.version for group in buffer.get(9, "math") if (oldest := group.oldest())]
    assert left == [2]
    pass_steps(scene, 6)
    assert buffer.get(9, "math") == []


def test_get_reads_other_pools_and_small_numbers(make_scene: Make) -> None:
    scene = make_scene(on_straggler="retry")
    scene.enqueue(2)
    for job in scene.claim(2):
        scene.submit(job, FIRST, status=Status.ABORTED)
    buffer = scene.run.buffer
    assert [group.status for group in buffer.get(9, "math", "aborted")] == [Status.ABORTED] * 2
    pass_steps(scene, 2)
    assert buffer.get(9, "math", "aborted") == []
    buffer.refresh_staleness("math")
    assert [group.status for group in buffer.get(9, "math", "expired")] == [Status.INIT] * 2
    assert buffer.get(0, "math") == buffer.get(-1, "math") == []
    with pytest.raises(ConfigError, match="5000 groups in one call"):
        buffer.get(5000, "math")


def test_get_leaves_out_what_has_left_and_raises_for_what_is_lost(scene: Scene) -> None:
    first, second = scene.ready(0, 0)
    token = scene.record(first)["payload"]
    scene.raw.unlink(scene.keys.payload(first, token))
    with pytest.raises(PayloadMissing):
        scene.run.buffer.get(2, "math")
    scene.raw.hset(scene.keys.group(first), "payload", "of another try")
    refs = [scene.payload(second)]
    assert gids(scene.run.buffer.read_many(refs)) == [second]


def test_delete_ends_one_group_or_those_that_fit_a_question(make_scene: Make) -> None:
    scene = make_scene()
    scene.open_trainer()
    first, *_ = scene.ready(0, 0, 1, lineage="l1")
    (other,) = scene.ready(0, task="code", lineage="l1")
    scene.enqueue(1)
    delete = scene.run.delete
    assert (delete(first), delete(first)) == (1, 0)
    assert delete({"task": "math", "version": {"$lte": 0}}) == 1
    assert delete({"task": "math"}) == 1  # what waits is in no pool
    assert scene.take(1, code=1).gids == [other]
    with pytest.raises(GroupHeld, match=r"in batch train:1"):
        delete(other)
    assert delete({}) == 0
    with pytest.raises(QueryError):
        delete({"colour": 1})
    assert scene.stream("fresh") != []
    scene.check()


def test_enqueue_passes_over_draws_that_cannot_be_used(scene: Scene) -> None:
    done = scene.enqueue(0, samples=[0, 2, 0, 2, 0, 2], target=2)
    assert (done.count, done.cursor) == (2, 4)
    assert [scene.bit("dropped", i) for i in range(6)] == [1, 0, 1, 0, 0, 0]
    assert (scene.counters()["dropped"], scene.counters()["enqueued"]) == ("2", "4")
    scene.check()


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
