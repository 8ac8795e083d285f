"""Workers: register, heartbeat, receipts, reap, fence (I2, I10, I11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.control.control import Mode
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.errors import Fenced
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from tests.buffer.scene import FIRST, LIMITS, Scene


def test_register_tells_the_run_and_its_control_state(scene: Scene) -> None:
    nonce = new_nonce()
    run_nonce, state = scene.run.fleet.register("w0", nonce, {"engine": "simulated", "host": "h"})
    assert (run_nonce, state.mode, state.weights) == (scene.run.nonce, Mode.RUN, FIRST)
    record = {k.decode(): v.decode() for k, v in scene.raw.hgetall(scene.keys.worker("w0")).items()}
    assert (record["engine"], record["host"], record["ack"], record["nonce"]) == (
        "simulated",
        "h",
        "0",
        nonce,
    )
    assert scene.raw.zrange(scene.keys.workers, 0, -1) == [b"w0"]
    (row,) = scene.run.fleet.workers()
    assert (row.id, row.state, row.engine, row.facts) == (
        "w0",
        WorkerState.STARTING,
        "simulated",
        {"host": "h"},
    )
    assert (row.holds, row.silent_ms < 60_000, row.is_barred) == (0, True, False)


def test_another_process_of_the_same_id_gives_back_what_the_first_one_held(scene: Scene) -> None:
    """It knows nothing of these groups; one of them may have ended the first process (I11)."""
    scene.enqueue(3)
    jobs = scene.claim(2)
    scene.nonces.clear()
    (own,) = scene.claim()
    assert scene.beat([own]).lost == ()
    assert len(scene.held()) == 3
    for job in (own, *jobs):
        scene.raw.hincrby(scene.keys.group(job.gid), "claimed_ms", -scene.run.limits.lease_ms - 1)
    scene.beat([own])
    assert scene.held() == [own.gid]
    assert {scene.record(job.gid)["tries"] for job in jobs} == {"1"}
    scene.check()


def test_reap_takes_back_all_of_a_silent_worker_and_nothing_else(scene: Scene) -> None:
    scene.enqueue(3)
    jobs = scene.claim(2)
    (other,) = scene.claim(worker="w1")
    scene.expire_leases("w0")
    assert scene.run.jobs.reap().groups == 2
    assert scene.stream("resume") == [job.gid for job in jobs]
    assert (scene.held("w0"), scene.held("w1")) == ([], [other.gid])
    record = scene.record(jobs[0].gid)
    assert (record["stage"], record["token"], record["owner"], record["tries"]) == (
        "waiting",
        "",
        "",
        "1",
    )
    assert (scene.counters()["running"], scene.counters()["leases_lost"]) == ("1", "2")
    scene.check()


def test_reap_forgets_workers_that_are_long_gone_once_they_hold_nothing(scene: Scene) -> None:
    scene.enqueue(1)
    scene.claim(worker="w0")
    scene.worker("w1"), scene.worker("w2")
    scene.raw.zadd(scene.keys.workers, {"w0": 1, "w1": 1})
    scene.expire_leases()
    scene.raw.zadd(scene.keys.leases, {"w0": scene.now_ms() + 5000})
    scene.run.jobs.reap()
    assert scene.raw.zrange(scene.keys.workers, 0, -1) == [b"w0", b"w2"]
    scene.expire_leases()
    scene.run.jobs.reap()
    assert scene.raw.zrange(scene.keys.workers, 0, -1) == [b"w2"]
    assert scene.raw.exists(scene.keys.worker("w0"), scene.keys.worker("w1")) == 0


def test_fence_revokes_everything_in_one_step(scene: Scene) -> None:
    scene.enqueue(2)
    scene.enqueue(1, task="quiz")
    jobs = scene.claim(3)
    assert scene.run.fleet.fence("w0") == 3
    assert scene.raw.zcard(scene.keys.leases) == 0
    assert len(scene.stream("resume")) == 2
    assert scene.stream("eval", "quiz") == [jobs[0].gid]
    assert scene.raw.exists(scene.keys.worker("w0"), scene.keys.leased("w0")) == 0
    with pytest.raises(Fenced):
        scene.submit(jobs[1])
    assert not scene.beat(jobs).known
    assert scene.run.fleet.fence("w0") == 0
    scene.check()


def test_deregister_needs_empty_hands(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    nonce = scene.worker()
    assert not scene.run.fleet.deregister("w0", nonce)
    assert scene.run.fleet.deregister("w0", new_nonce())
    assert scene.raw.exists(scene.keys.worker("w0")) == 1
    scene.run.jobs.release("w0", job, "handback")
    assert scene.run.fleet.deregister("w0", nonce)
    assert scene.raw.exists(scene.keys.worker("w0"), scene.keys.workers) == 0
    assert scene.run.fleet.deregister("w0", nonce)


def test_a_worker_that_was_fenced_leaves_its_tokens_in_the_account(scene: Scene) -> None:
    scene.enqueue(1)
    scene.claim()
    nonce = scene.worker()
    scene.run.fleet.fence("w0")
    for _ in range(2):
        assert scene.run.fleet.deregister("w0", nonce, "math=9:7:3:0")
        account = scene.run.account.tokens()["math"]
        assert (account.total, account.table["lost"], account.prompt) == (9, 9, 3)
    scene.run.fleet.deregister("w0", new_nonce(), "math=20:20:20:0")
    assert scene.run.account.tokens()["math"] == account
    scene.check()


def test_pulse_is_what_the_record_shows(scene: Scene) -> None:
    pulse = HeartbeatReport(
        1,
        PolicyVersion("l1", 4),
        WorkerState.PAUSED,
        tokens_per_s=12.34,
        done=7,
        judging=2,
        replaced=3,
    )
    scene.run.fleet.heartbeat("w0", scene.worker(), pulse, [])
    (row,) = scene.run.fleet.workers()
    assert (row.weights, row.state, row.tokens_per_s, row.done, row.ack) == (
        "l1:4", "paused", 12.3, 7, 1,
    )  # fmt: skip
    assert (row.judging, row.requests, row.replaced) == (2, None, 3)


def test_whatever_a_foreign_worker_writes_its_record_can_be_read(scene: Scene) -> None:
    scene.beat([])
    numbers = {
        **dict.fromkeys(("done", "seen_ms", "ack"), b"1\xff"),
        "report": b"done=1\xff requests=x tokens_per_s= seen_ms=5 state=\xff =1 judged judging=2",
    }
    texts = {
        "state": b"alive\xff", "id": "someone else", "holds": "9", "facts": "x", "model": "tiny",
    }  # fmt: skip
    scene.raw.hset(scene.keys.worker("w0"), mapping={**numbers, **texts})
    (row,) = scene.run.fleet.workers()
    assert (row.id, row.holds, row.state) == ("w0", 0, "alive\ufffd")
    assert (row.done, row.requests, row.tokens_per_s, row.seen_ms, row.ack) == (0, None, 0.0, 0, 0)
    assert row.judging == 2
    assert (row.facts, row.is_live(60_000)) == ({"model": "tiny"}, False)


def test_reap_takes_back_groups_of_tasks_that_its_caller_does_not_know(scene: Scene) -> None:
    scene.enqueue(3, task="code")
    scene.enqueue(1)
    scene.claim(4)
    scene.expire_leases()
    narrow = RunLimits(**{**LIMITS.model_dump(), "tasks": {"math": TaskLimits()}})
    caller = Run(scene.store, scene.name, scene.run.nonce, narrow)
    assert [caller.jobs.reap(limit=2).groups for _ in range(2)] == [2, 2]
    assert (len(scene.stream("resume", "code")), len(scene.stream("resume"))) == (3, 1)
    scene.check()


def test_reap_is_not_stopped_by_leases_without_a_record(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.raw.delete(scene.keys.leased("w0"))
    held = {"math-0000000007": "t", "math-0000000008": "t", job.gid: job.token}
    scene.raw.hset(scene.keys.leased("w0"), mapping={**held, "digest": 7})
    scene.expire_leases()
    assert [scene.run.jobs.reap(limit=1).groups for _ in range(3)] == [0, 0, 1]
    assert scene.raw.exists(scene.keys.leases, scene.keys.leased("w0")) == 0
    scene.check()


def test_fence_wakes_the_producer_for_what_it_buries_and_workers_for_what_waits(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(max_tries=2)
    scene.enqueue(1)
    workers = scene.keys.wake_up("workers")
    producer = scene.keys.wake_up("producer")
    for rings in ((1, 0), (0, 1)):
        scene.claim()
        scene.raw.delete(workers, producer)
        scene.run.fleet.fence("w0")
        scene.nonces.clear()
        assert (scene.raw.llen(workers), scene.raw.llen(producer)) == rings
    scene.check()
