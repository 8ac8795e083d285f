"""Requeue, drop and quarantine: groups that operators and trainers move (I1, I5, I8, I11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import Fenced, GroupHeld, LedgerError
from buffer.ids import group_id, new_nonce
from buffer.job import Job
from buffer.manifest import Manifest, ManifestEntry
from buffer.wire.rollout import Status
from tests.buffer.keyspace import payload_keys
from tests.buffer.scene import Scene


def bury(scene: Scene, reason: str = "no good") -> Job:
    """Make a dead group that had tokens before it died."""
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    for _ in range(scene.run.limits.max_tries):
        (job,) = scene.claim()
        assert job.payload.token != "init"
        scene.run.jobs.release("w0", job, "failed", reason)
    assert scene.record(job.gid)["stage"] == "dead"
    return job


def quarantine(
    scene: Scene, step: int, entry: ManifestEntry, reason: str = "bad bytes"
) -> Manifest:
    return scene.run.ledger.quarantine(scene.trainer, step, entry, reason)


# -- requeue ----


def test_requeue_lets_a_dead_group_wait_again_from_its_prompt_with_all_its_tries(
    scene: Scene,
) -> None:
    job = bury(scene)
    assert scene.run.jobs.requeue(job.gid) == "dead"
    assert (scene.stream("resume"), scene.raw.zcard(scene.keys.dead)) == ([job.gid], 0)
    assert scene.run.dead_letters.reason(job.gid) is None
    assert scene.garbage() == {f"{job.gid} {job.payload.token} 1"}
    scene.check()
    scene.run.janitor.sweep()
    (again,) = scene.claim()
    assert (again.tries, again.payload.token) == (1, "init")
    scene.submit(again)
    scene.check()


def test_requeue_repeated_after_a_lost_reply_does_not_throw_away_what_was_made_since(
    scene: Scene,
) -> None:
    operation = new_nonce()
    (gid,) = scene.ready(0)
    scene.run.jobs.requeue(gid, operation=operation)
    (job,) = scene.claim()
    scene.submit(job)
    before = scene.dump()
    scene.run.jobs.requeue(gid, operation=operation)
    assert scene.dump() == before
    assert scene.run.jobs.requeue(gid) == "completed"


@pytest.mark.parametrize("operation", ["requeue", "drop"])
def test_groups_that_run_are_taken_or_have_ended_are_left_alone(
    scene: Scene, operation: str
) -> None:
    move: Callable[[str], str] = getattr(scene.run.jobs, operation)
    scene.open_trainer()
    taken, archived = scene.ready(0, 0)
    scene.take(1), scene.take(2)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.enqueue(1)
    (job,) = scene.claim()
    before = scene.dump()
    for gid, why in (
        (job.gid, "runs on w0"),
        (archived, "is in batch train:2"),
        (taken, "it is archived"),
        (group_id("math", 99), "never started"),
    ):
        with pytest.raises(GroupHeld, match=why):
            move(gid)
    assert scene.dump() == before


# -- drop ----


def test_drop_ends_groups_wherever_they_may_be_dropped(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(on_straggler="retry", tail_batch_trigger_size=1)
    scene.open_trainer(lineage="l0")
    dead = bury(scene)
    old, ready = scene.ready(0, 5)
    scene.raw.hset(scene.keys.ledger("train"), mapping={"taken": 4, "committed": 4, "freed": 4})
    scene.run.janitor.sweep()
    scene.enqueue(2)
    (job,) = scene.claim()
    scene.submit(job, status=Status.ABORTED)
    waiting = group_id("math", 4)
    gids = {
        dead.gid: "dead",
        ready: "completed",
        old: "expired",
        job.gid: "aborted",
        waiting: "waiting",
    }
    assert {gid: scene.run.jobs.drop(gid) for gid in gids} == gids
    assert scene.run.account.totals().tasks[0].dropped == len(gids)
    assert all(scene.record(gid) == {} and f"{gid} init 1" in scene.garbage() for gid in gids)
    scene.check()
    assert scene.run.jobs.drop(waiting) == "dropped"
    while scene.run.payloads.collect():
        pass
    assert payload_keys(scene.raw, scene.name) == []


def test_drop_of_a_running_group_revokes_the_lease_of_the_named_worker_only(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    with pytest.raises(GroupHeld, match="runs on w0"):
        scene.run.jobs.drop(job.gid, revoke="w1")
    assert scene.run.jobs.drop(job.gid, revoke="w0") == "running"
    with pytest.raises(Fenced):
        scene.run.jobs.release("w0", job, "handback")
    assert scene.beat([job]).lost == (job,)
    assert scene.held() == []
    assert scene.counters()["leases_lost"] == "1"
    scene.check()


# -- quarantine ----


def test_quarantine_swaps_a_group_for_the_next_ready_one_in_its_slot(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    gids = scene.ready(0, 0, 0, 1)
    scene.ready(0, task="code")
    first = scene.take(1, math=3)
    revised = quarantine(scene, 1, first.entries[1])
    assert revised.gids == [gids[0], gids[3], gids[2]]
    assert revised.revision == 1
    assert scene.take(1, math=9) == scene.run.ledger.manifest(1) == revised
    assert scene.run.dead_letters.reason(gids[1]) == {
        "reason": "bad bytes",
        "worker": "w0",
        "step": 1,
    }
    assert {w.id: w.quarantined for w in scene.run.fleet.workers()} == {"w0": 1}
    assert {n: scene.counters()[n] for n in ("taken", "dead", "consumed", "quarantined")} == {
        "taken": "3", "dead": "1", "consumed": "3", "quarantined": "1"
    }  # fmt: skip
    scene.check()
    scene.run.ledger.commit(scene.trainer, 1, 1)
    assert scene.run.jobs.requeue(gids[1]) == "dead"
    scene.check()


def test_quarantine_is_refused_to_a_zombie_after_commit_and_outside_of_the_batch(
    scene: Scene,
) -> None:
    zombie = scene.open_trainer()
    scene.ready(0, 0, 0)
    first = scene.take(1)
    with pytest.raises(LedgerError, match="not in the batch"):
        quarantine(scene, 2, first.entries[0])
    scene.open_trainer(lineage="l2", take_over=True)
    with pytest.raises(Fenced):
        scene.run.ledger.quarantine(zombie, 1, first.entries[0], "")
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 0)
    before = scene.dump()
    with pytest.raises(LedgerError, match="step 1 is committed"):
        quarantine(scene, 1, first.entries[0])
    assert scene.dump() == before


def test_dead_letters_are_listed_newest_first_with_strange_reasons(scene: Scene) -> None:
    first = bury(scene, 'he said "no"\n\x1b[31m')
    scene.open_trainer()
    (gid,) = scene.ready(0)
    quarantine(scene, 1, scene.take(1).entries[0], 'bytes "\\" \x00')
    letters = {letter.gid: letter for letter in scene.run.dead_letters.newest()}
    assert len(scene.run.dead_letters) == 2
    assert (letters[first.gid].reason, letters[first.gid].tries) == ('he said "no"\n\\u001b[31m', 3)
    assert (letters[gid].reason, letters[gid].step, letters[gid].worker) == (
        'bytes "\\" \x00',
        1,
        "w0",
    )
    assert all(letter.age_ms >= 0 and letter.task == "math" for letter in letters.values())
