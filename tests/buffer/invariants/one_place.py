"""I1 to I4: every group is in one place, has one owner, comes in once; a batch is all or nothing."""

from __future__ import annotations

import pytest

from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.errors import Fenced, PayloadMissing
from buffer.groups.claim import Enqueued
from buffer.ids import group_id, new_nonce
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene


def every_move_keeps_the_account(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(10, samples=[2] * 8 + [0, -1])
    ready, useless, aborted, failed, silent, fenced, absurd, *_ = scene.claim(8)
    scene.check()
    scene.submit(ready)
    scene.submit(useless, filtered=True)
    scene.submit(aborted, status=Status.ABORTED)
    scene.run.jobs.release("w0", failed, "failed")
    scene.check()
    assert scene.run.jobs.release("w0", absurd, "skipped", "no page") == "skipped"
    scene.check()
    scene.take_back(silent.gid)
    scene.check()
    assert scene.run.fleet.fence("w0") == 2
    scene.nonces.clear()
    scene.check()
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 1
    scene.check()
    assert scene.run.jobs.drop(fenced.gid) == "waiting"
    scene.check()
    scene.take(1)
    scene.check()
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.check()


def what_expires_is_in_one_pool(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    gid = scene.ready(0, 1)[0]
    scene.raw.hset(scene.keys.ledger("train"), "taken", 2)
    scene.run.buffer.refresh_staleness("math")
    stages = scene.run.account.stages("math", int(gid[-10:]))
    assert stages == (["pool"] if scene.run.record(gid) else ["dropped"])
    assert scene.pool("completed")[0][0] != gid
    scene.raw.hset(scene.keys.ledger("train"), "taken", 0)
    scene.check()


def a_forged_copy_of_the_cursor_moves_nothing(scene: Scene) -> None:
    """A worker may write the account of a task, but not what the producer goes by."""
    scene.enqueue(2)
    for forged in (0, 7, 100):
        scene.raw.hset(scene.keys.progress("math"), "cursor", forged)
        assert not scene.run.account.fsck().clean
        cursor = scene.run.jobs.cursor("math")
        assert scene.enqueue(1) == Enqueued(1, cursor + 1)
        scene.check()
    assert scene.stream("fresh") == [group_id("math", draw) for draw in range(5)]


def by_hand_keeps_the_account(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    bad, _, spare = scene.ready(0, 0, 0)
    scene.enqueue(1)
    (running,) = scene.claim()
    entry = scene.take(1, math=2).entries[0]
    manifest = scene.run.ledger.quarantine(scene.trainer, 1, entry, "bad")
    assert manifest.gids[0] == spare
    scene.check()
    assert scene.run.jobs.requeue(bad) == "dead"
    scene.check()
    assert scene.run.jobs.drop(running.gid, revoke="w0") == "running"
    scene.check()


def an_old_token_changes_nothing(scene: Scene) -> None:
    scene.enqueue(1)
    (old,) = scene.claim()
    scene.expire_leases()
    scene.run.jobs.reap()
    assert scene.beat([old]).lost == (old,)
    with pytest.raises(Fenced):
        scene.submit(old)
    (new,) = scene.claim(worker="w1")
    before = scene.dump()
    assert scene.beat([old]).lost == (old,)
    for kind in ("handback", "aborted", "failed", "lost"):
        with pytest.raises(Fenced):
            scene.run.jobs.release("w0", old, kind)
    with pytest.raises(Fenced):
        scene.submit(old)
    changes = {
        key
        for key in before.keys() | scene.dump().keys()
        if before.get(key) != scene.dump().get(key)
    }
    # the bytes of the zombie lie under its own token
    assert changes <= {"worker:w0", f"payload:{old.gid}:{old.token}"}
    assert scene.held() == []
    scene.submit(new, worker="w1")
    assert scene.record(new.gid)["payload"] == new.token


def a_lease_is_renewed_by_its_owner_only(scene: Scene) -> None:
    """A worker that holds what it does not know, and never settles that, loses it."""
    scene.enqueue(1)
    scene.claim()
    nonce = scene.worker()
    scene.expire_leases()
    scene.run.store.call(
        "heartbeat",
        scene.keys.slots(worker="w0"),
        {
            "worker": "w0",
            "nonce": nonce,
            "lease_ms": scene.run.limits.lease_ms,
            **HeartbeatReport(1, FIRST, WorkerState.IDLE).arguments(),
            "held": 0,
            "digest": 0,
        },
    )
    assert scene.run.jobs.reap().groups == 1


def what_a_worker_does_not_know_is_taken_back(scene: Scene) -> None:
    """The worker holds as many groups as the server says, but others."""
    scene.enqueue(3)
    jobs = scene.claim(3)
    mine, other, lost = jobs
    assert scene.run.jobs.drop(lost.gid, revoke="w0") == "running"
    scene.raw.hset(scene.keys.group(other.gid), "claimed_ms", 1)
    assert scene.beat([mine, lost]).lost == (lost,)
    assert scene.held() == [mine.gid]
    assert scene.record(other.gid)["stage"] == "waiting"
    assert scene.record(other.gid)["tries"] == "1"
    assert scene.beat([mine]).is_agreed
    scene.check()


def a_claim_under_way_is_not_taken_back(scene: Scene) -> None:
    """A heartbeat may overtake the reply to a claim, or carry what was held before it."""
    scene.enqueue(2)
    (mine,) = scene.claim()
    (new,) = scene.claim()
    beat = scene.beat([mine])
    assert (beat.lost, beat.is_agreed) == ((), False)
    scene.submit(new)
    assert scene.beat([mine]).is_agreed
    scene.check()


def a_silent_registration_ends_before_its_groups_are_taken(scene: Scene) -> None:
    """A reaper dies after a slice; the worker wakes up, and the next reaper takes the rest."""
    scene.enqueue(5)
    jobs = scene.claim(5)
    nonce = scene.worker()
    scene.expire_leases()
    assert scene.run.jobs.reap(limit=2).groups == 2
    scene.check()
    scene.nonces["w0"] = nonce
    assert not scene.beat(jobs).known
    assert scene.run.jobs.claim("w0", nonce, new_nonce(), FIRST, 1).refusal == "UNKNOWN"
    scene.run.fleet.register("w0", nonce, {})
    assert scene.beat(jobs[2:]).is_agreed
    scene.expire_leases()
    assert [scene.run.jobs.reap(limit=2).groups for _ in range(2)] == [2, 1]
    with pytest.raises(Fenced):
        scene.submit(jobs[0])
    scene.check()


def no_prompt_is_skipped_or_doubled(scene: Scene) -> None:
    scene.enqueue(2)
    again = scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 0, [2, 2], 1000)
    assert (again.count, again.cursor) == (0, 2)
    first = scene.stream("fresh")
    assert first == ["math-0000000000", "math-0000000001"]
    # a server that lost its last second: what came in is passed over
    scene.raw.hset(scene.keys.progress("math"), mapping={"cursor": 0, "reentered": 2})
    scene.raw.hset(scene.keys.cursors, "math", 0)
    again = scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 0, [2, 2], 1000)
    assert (again.count, again.cursor) == (0, 2)
    assert scene.stream("fresh") == first
    scene.check()


def a_draw_that_has_ended_does_not_start_again(scene: Scene) -> None:
    scene.enqueue(3)
    scene.run.jobs.drop("math-0000000002")
    scene.raw.delete(*(scene.keys.group(f"math-{draw:010d}") for draw in (0, 1)))
    scene.raw.delete(scene.keys.jobs("math", "fresh"))
    # a server that lost its last second: only the end of the last draw is still there
    scene.raw.hset(
        scene.keys.progress("math"), mapping={"cursor": 0, "reentered": 1, "enqueued": 1}
    )
    scene.raw.hset(scene.keys.cursors, "math", 0)
    again = scene.enqueue(3)
    assert (again.count, again.cursor) == (2, 3)
    assert scene.stream("fresh") == ["math-0000000000", "math-0000000001"]
    assert scene.run.account.stages("math", 2) == ["dropped"]


def nothing_starts_beyond_the_target(scene: Scene) -> None:
    assert scene.enqueue(3, target=2).count == 2
    scene.submit(scene.claim()[0])
    assert scene.enqueue(3, target=2).count == 0


def a_prompt_without_bytes_is_not_started(scene: Scene) -> None:

    scene.open_producer()
    with pytest.raises(PayloadMissing):
        scene.run.jobs.enqueue(scene.producer, new_nonce(), "math", 0, [2], 10)


def a_batch_is_of_all_tasks_or_of_none(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    before = scene.dump()
    assert scene.try_take(1, math=2, code=1).missing == {"math": (2, 2), "code": (0, 1)}
    assert scene.dump() == before
    scene.ready(0, task="code")
    assert len(scene.take(1, math=2, code=1).gids) == 3
    assert [scene.counters(task).get("consumed") for task in ("math", "code")] == ["2", "1"]
    assert scene.pool("completed") == []
    scene.check()
