"""I10 to I13: a pause holds, poison and outages are contained, memory is bounded, a repeated call
is harmless.
"""

from __future__ import annotations

from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.control.task_status import TaskStop
from buffer.errors import Fenced, ScriptError, StoreUnavailable
from buffer.groups.submit import Stored, Submission
from buffer.ids import new_nonce
from buffer.job import Job, PayloadRef, Result
from buffer.ledger.ledger import BAD_GROUPS, BAD_WINDOW_MS
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import RunContext
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.keyspace import changed
from tests.buffer.scene import FIRST, Scene, extend


def a_paused_worker_claims_nothing(scene: Scene) -> None:
    scene.enqueue(2)
    nonce = scene.worker()
    scene.pause()
    assert scene.run.jobs.claim("w0", nonce, new_nonce(), FIRST, 1).refusal == "PAUSED"
    scene.pause(lanes="eval")
    assert scene.run.jobs.claim("w0", nonce, new_nonce(), FIRST, 1).jobs == []
    scene.pause(Mode.RUN)
    assert len(scene.claim()) == 1
    scene.pause()
    assert scene.enqueue(1).refusal == "CLOSED"


def old_weights_claim_nothing(scene: Scene) -> None:
    scene.open_trainer(lineage="l1")
    scene.enqueue(1)
    nonce = scene.worker()
    epoch = scene.run.control.state().epoch
    assert (
        scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 1), "/w", "").epoch
        == epoch + 1
    )
    claim = scene.run.jobs.claim("w0", nonce, new_nonce(), FIRST, 1)
    assert (claim.refusal, claim.jobs) == ("STALE", [])


def a_stranger_claims_nothing(scene: Scene) -> None:
    scene.enqueue(1)
    scene.worker()
    assert scene.run.jobs.claim("w0", "not-its-nonce", new_nonce(), FIRST, 1).refusal == "UNKNOWN"


def a_receipt_means_no_leases(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    epoch = scene.pause(Mode.ABORT)
    scene.beat([job], ack=epoch)
    assert scene.run.receipts.silent(epoch) == ["w0"]
    scene.run.jobs.release("w0", job, "handback")
    # an epoch that never was, or no longer is after a loss, confirms nothing
    scene.beat([], ack=epoch + 5)
    assert scene.run.receipts.silent(epoch) == ["w0"]
    assert scene.receipt(epoch) == "OK"
    assert scene.run.receipts.silent(epoch) == []


def the_operators_pause_survives_the_trainer(scene: Scene) -> None:
    scene.open_trainer()
    epoch = scene.pause(Mode.ABORT)
    state = scene.run.control.set_mode("trainer", Mode.RUN, nonce=scene.trainer)
    assert (state.mode, state.lanes) == (Mode.ABORT, ())
    assert state.epoch == epoch + 1


def tries_are_used_up_by_failures_only(scene: Scene) -> None:
    scene.enqueue(1)
    for _ in range(4):
        (job,) = scene.claim()
        assert scene.run.jobs.release("w0", job, "handback") == "waiting"
    (job,) = scene.claim()
    assert job.tries == 1
    scene.submit(job, status=Status.ABORTED)
    assert scene.record(job.gid)["tries"] == "0"
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 1
    (job,) = scene.claim()
    assert scene.run.jobs.release("w0", job, "failed") == "waiting"
    (job,) = scene.claim()
    scene.expire_leases()
    assert scene.run.jobs.reap().groups == 1
    assert scene.record(job.gid)["stage"] == "dead"
    assert len(scene.run.dead_letters) == 1
    assert scene.run.dead_letters.reason(job.gid)
    scene.check()


def nobody_loses_a_lease_to_an_outage(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    for seen in (scene.now_ms() - 600_000, scene.now_ms() + 600_000):
        scene.expire_leases()
        scene.raw.hset(scene.keys.clock, "seen_ms", seen)
        assert scene.run.jobs.reap().groups == 0
    assert scene.beat([job]).lost == ()


def a_deadline_of_a_clock_that_stepped_back_comes_nearer(scene: Scene) -> None:
    scene.enqueue(1)
    scene.claim()
    scene.raw.zadd(scene.keys.leases, {"w0": scene.now_ms() + 10**9})
    scene.run.jobs.reap()
    assert (
        scene.raw.zscore(scene.keys.leases, "w0") < scene.now_ms() + 2 * scene.run.limits.lease_ms
    )


def poison_counts_against_its_worker(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0)
    (entry,) = scene.take(1).entries
    scene.run.ledger.quarantine(scene.trainer, 1, entry, "bad bytes")
    assert scene.record(entry.gid)["stage"] == "dead"
    assert scene.run.dead_letters.reason(entry.gid)["worker"] == "w0"
    assert [worker.quarantined for worker in scene.run.fleet.workers()] == [1]
    scene.check()


def who_hands_in_too_much_poison_claims_nothing_more(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(*[0] * BAD_GROUPS)
    scene.enqueue(2 * BAD_GROUPS)
    for entry in scene.take(1, math=BAD_GROUPS).entries:
        assert scene.claim(1)  # not refused yet
        scene.run.ledger.quarantine(scene.trainer, 1, entry, "bad bytes")
    claim = scene.run.jobs.claim("w0", scene.worker(), new_nonce(), FIRST, 1)
    assert (claim.refusal, claim.jobs) == ("BARRED", [])
    # a restart under the same name does not help; others go on
    scene.nonces.pop("w0")
    assert scene.run.jobs.claim("w0", scene.worker(), new_nonce(), FIRST, 1).refusal == "BARRED"
    assert scene.claim(1, worker="good")
    assert {w.id: w.bad_groups for w in scene.run.fleet.workers()} == {
        "w0": BAD_GROUPS,
        "good": None,
    }
    assert scene.run.fleet.unbar("w0") == BAD_GROUPS
    assert scene.run.fleet.unbar("w0") == 0
    assert scene.claim(1)
    scene.check()


def old_poison_is_forgiven(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    bad = scene.take(1, math=2).entries
    scene.run.ledger.quarantine(scene.trainer, 1, bad[0], "bad bytes")
    scene.raw.hset(
        scene.keys.bad_submissions, "w0", f"{scene.now_ms() - BAD_WINDOW_MS - 1} {BAD_GROUPS - 1} 0"
    )
    scene.run.ledger.quarantine(scene.trainer, 1, bad[1], "bad bytes")
    scene.enqueue(1)
    assert scene.claim(1)


def nothing_fresh_starts_above_the_low_mark(scene: Scene) -> None:
    scene.enqueue(3)
    scene.claim(1)  # where nothing runs, a little is started however full it is
    scene.run.limits.low_bytes = 1
    assert scene.enqueue(1).count == 0
    assert scene.run.jobs.claim("w0", scene.worker(), new_nonce(), FIRST, 1).jobs == []


def bytes_that_nobody_needs_are_freed(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(2)
    part, other = scene.claim(2)
    scene.submit(part, status=Status.ABORTED)
    scene.submit(other, filtered=True)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    (whole,) = scene.claim()
    scene.submit(whole)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    while scene.run.payloads.collect():
        pass
    assert scene.raw.keys(f"{scene.keys.prefix}payload:*") == []
    assert scene.run.memory.count().held == 0


def what_drains_works_when_memory_is_full(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0)
    scene.enqueue(1)
    (job,) = scene.claim()
    most = scene.raw.config_get("maxmemory")["maxmemory"]
    scene.store.deadline_s = 0.2
    scene.raw.config_set("maxmemory", 1)
    try:
        scene.beat([job])
        scene.beat([])
        scene.receipt(1)
        scene.run.jobs.release("w0", job, "handback")
        scene.take(1)
        scene.run.ledger.commit(scene.trainer, 1, 1)
        with pytest.raises(StoreUnavailable):
            scene.claim()
    finally:
        scene.raw.config_set("maxmemory", most)


def a_repeated_call_is_harmless(scene: Scene) -> None:
    """Every call is made twice, as if its reply had been lost."""
    store: Any = scene.store
    once = store.send

    def twice(what: str, commands: Any, **options: Any) -> Any:
        *_, reply = answers = once(what, commands, **options)
        if isinstance(commands[-1], ScriptCall):
            before = scene.dump()
            *_, again = once(what, commands, **options)
            assert what == "deregister" or again[0] == reply[0], what
            assert again == reply or what not in ("claim", "take_batch", "enqueue"), what
            assert changed(before, scene.dump()) == {}, what
        return answers

    store.send = twice
    try:
        _live(scene)
    finally:
        del store.send
    scene.check()


def a_call_that_is_repeated_late_is_harmless(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    (gid,) = scene.ready(0)
    store: Any = scene.store
    once, said = store.call, []

    def note(*args: Any, **options: Any) -> Any:
        said.append(args)
        return once(*args, **options)

    store.call = note
    scene.run.jobs.requeue(gid)
    scene.pause()
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l0", 1), "/1", "")
    scene.run.task_stops.publish(scene.producer, "math", TaskStop("enough", 1))
    del store.call
    assert [call[0] for call in said] == ["requeue", "control", "publish_weights", "halt"]
    scene.pause(Mode.RUN)
    scene.run.task_stops.publish(scene.producer, "math", TaskStop())
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l0", 2), "/2", "")
    scene.claim(weights=PolicyVersion("l0", 2))
    before = scene.dump()
    for call in said:
        assert once(*call)[0] == "OK"
    assert changed(before, scene.dump()) == {}


def results_that_come_together_are_judged_each_by_itself(scene: Scene) -> None:
    """One call: completed, fenced, filtered, aborted, completed, and the first once more."""
    scene.enqueue(6)
    jobs = scene.claim(6)
    scene.take_back(jobs[1].gid)
    made = [extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST) for job in jobs]
    made[3] = extend(scene.run.buffer.read(jobs[3].payload), Status.ABORTED, FIRST)
    results = [
        Result(job, group, 4, filtered=n == 2)
        for n, (job, group) in enumerate(zip(jobs[:5], made, strict=False))
    ]
    results.append(results[0])
    outcomes = scene.run.buffer.submit_many("w0", results)
    assert [type(outcome) for outcome in outcomes] == [
        Stored, Fenced, Stored, Stored, Stored, Stored,
    ]  # fmt: skip
    arrivals = [outcome.arrival for outcome in outcomes if isinstance(outcome, Stored)]
    assert arrivals == [1, 2, 3, 4, 1]
    scene.check()
    # the lease goes on with what is still held, and only with that
    assert scene.beat([jobs[5]]).lost == ()
    assert [gid for gid, _ in scene.pool("completed")] == [jobs[0].gid, jobs[4].gid]
    for job, group in zip(jobs[:5:4], made[:5:4], strict=True):
        assert scene.run.buffer.read(PayloadRef(job.gid, job.token, 1, 0, "")).gid == group.gid
        assert scene.raw.ttl(scene.keys.payload(job.gid, job.token)) == -1
    before = scene.dump()
    again = scene.run.buffer.submit_many("w0", results)
    assert [type(outcome) for outcome in again] == [type(outcome) for outcome in outcomes]
    assert changed(before, scene.dump()) == {}
    _chunks_belong_to_their_groups(scene, jobs[5], made[5])


def _chunks_belong_to_their_groups(scene: Scene, job: Job, group: RolloutGroup) -> None:
    run, store = scene.run, scene.store
    submission = Submission(RunContext(store, run.keys, run.limits), run.payloads)
    (unit,) = submission.prepare([Result(job, group, 4)])
    store.send("payload write", unit.sets)
    call = submission.call("w0", "math", [unit.arguments])
    before = scene.dump()
    with pytest.raises(ScriptError):
        store.send("submit", [call._replace(tail_keys=[*call.tail_keys, run.keys.meta])])
    assert changed(before, scene.dump()) == {}


def _live(scene: Scene) -> None:
    scene.open_producer()
    scene.open_trainer(lineage="l0")
    scene.enqueue(6)
    ready, useless, partial, back, *more = scene.claim(6)
    scene.submit(ready)
    scene.submit(useless, filtered=True)
    scene.submit(partial, status=Status.ABORTED)
    scene.run.jobs.release("w0", back, "handback")
    for job in more:
        scene.submit(job)
    entry = scene.take(1, math=2).entries[0]
    scene.run.ledger.quarantine(scene.trainer, 1, entry, "bad")
    scene.run.jobs.requeue(entry.gid)
    scene.run.jobs.drop(back.gid)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.control.publish_weights(scene.trainer, PolicyVersion("l0", 1), "/w", "")
    scene.pause()
    scene.run.fleet.deregister("w0", scene.worker())
    scene.run.control.renew_role("trainer", scene.trainer, closing=True)
