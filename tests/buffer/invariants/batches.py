"""I5 to I9: batches are records, freed behind a checkpoint, taken by one trainer, never too stale,
stamped truly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.control.task_status import TaskStop
from buffer.errors import Fenced, LedgerError, LostRun, RoleHeld
from buffer.ids import new_nonce
from buffer.manifest import Manifest, NotReady
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.scene import Scene, extend


def a_step_is_taken_once_and_in_turn(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0, 0)
    first = scene.take(1, math=2)
    assert scene.take(1, math=2) == first
    with pytest.raises(LedgerError, match="last taken step is 1"):
        scene.run.ledger.take(scene.trainer, 3, {"math": 1})
    before = scene.dump()
    scene.try_take(2, strict=False, code=1)
    assert scene.dump() == before
    assert len(scene.take(2).gids) == 1


def a_changed_batch_is_its_record(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0, 0)
    bad = scene.take(1, math=2).entries[0]
    changed = scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad")
    assert changed.gids[0] != bad.gid
    assert "revision=1" in changed.header
    assert scene.take(1, math=2) == changed
    assert scene.record(changed.gids[0])["stage"] == "taken"


def a_place_that_was_left_is_filled_once_and_in_the_record(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    bad, kept = scene.take(1, math=2).entries
    assert scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad").open_places == {"math": 1}
    assert isinstance(scene.run.ledger.refill(scene.trainer, 1), NotReady)
    ledger = scene.keys.ledger("train")
    assert (scene.counters()["consumed"], scene.raw.hget(ledger, "awaits")) == ("1", b"1")
    scene.check()
    scene.open_trainer(lineage="l0", take_over=True)
    assert scene.raw.hget(ledger, "awaits") is None
    assert isinstance(scene.run.ledger.refill(scene.trainer, 1), NotReady)
    assert scene.raw.hget(ledger, "awaits") == b"1"
    late, _ = scene.ready(0, 0)
    filled = scene.run.ledger.refill(scene.trainer, 1)
    assert scene.run.ledger.refill(scene.trainer, 1) == filled == scene.take(1, math=2)
    assert isinstance(filled, Manifest)
    assert (filled.gids, filled.open_places.total()) == ([kept.gid, late], 0)
    assert scene.raw.hget(ledger, "awaits") is None
    assert scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad") == filled
    assert (scene.record(late)["stage"], scene.counters()["consumed"]) == ("taken", "2")
    scene.check()


def what_a_batch_lacks_is_still_of_use(scene: Scene) -> None:
    """Staleness 1 is too much: what completes step 1 is too old for step 2."""
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0, 0, 0)
    for bad in scene.take(1, math=4).entries:
        scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad")
    assert isinstance(scene.run.ledger.refill(scene.trainer, 1), NotReady)
    assert scene.counters().get("awaited") == "4"
    late = scene.ready(0, 0)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 0}
    scene.run.ledger.refill(scene.trainer, 1)
    assert (scene.take(1).gids, scene.counters()["awaited"]) == (late, "2")
    # the trainer continues with what it has
    scene.ready(1)
    scene.take(2)
    scene.ready(1, 2)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    scene.check()


def what_only_a_smaller_batch_could_use_keeps_nothing_waiting(scene: Scene) -> None:
    """Staleness 1 is too much. A trainer that waits no longer asks for the next step, or commits."""
    scene.open_trainer(lineage="l0")
    for step in (1, 2):
        scene.ready(step - 1)
        (bad,) = scene.take(step).entries
        scene.run.ledger.quarantine(scene.trainer, step, bad, "bad")
        assert isinstance(scene.run.ledger.refill(scene.trainer, step), NotReady)
        scene.ready(step - 1)  # too late
        assert scene.enqueue(1, target=1).count == 0
        if step == 1:
            scene.try_take(2)
        else:
            scene.run.ledger.commit(scene.trainer, 2, 2)
        assert scene.enqueue(1, target=1).count == 1
        scene.run.jobs.drop(*scene.stream("fresh"))
        scene.check()


def nothing_is_freed_that_a_kept_checkpoint_may_ask_for(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 1, 2)
    batches = [scene.take(step) for step in (1, 2, 3)]
    for _ in range(2):
        scene.run.ledger.commit(scene.trainer, 2, 1)
        assert scene.run.ledger.steps() == (3, 2, 1)
    assert scene.run.account.stages("math", 1) == ["taken"]
    scene.run.ledger.commit(scene.trainer, 2, 3)
    assert scene.run.ledger.steps() == (3, 2, 2)
    with pytest.raises(LedgerError):
        scene.run.ledger.commit(scene.trainer, 9, 1)
    assert scene.take(3) == batches[2]
    for step in (1, 2):
        with pytest.raises(LedgerError, match="behind"):
            scene.run.ledger.take(scene.trainer, step, {"math": 1})
    scene.check()


def a_trainer_opens_what_is_kept_of_the_run_it_knows(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    second = [scene.take(step) for step in (1, 2)][1]
    scene.run.ledger.commit(scene.trainer, 1, 1)
    before = scene.dump()
    with pytest.raises(LostRun):
        scene.open_trainer(1, take_over=True, run_nonce=new_nonce())
    for step in (0, 9):
        with pytest.raises(LedgerError):
            scene.open_trainer(step, take_over=True)
    assert scene.dump() == before
    scene.open_trainer(1, "l2", take_over=True)
    assert scene.take(2) == second


def there_is_one_trainer_and_one_producer(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.open_producer()
    with pytest.raises(RoleHeld):
        scene.open_trainer()
    with pytest.raises(RoleHeld):
        scene.open_producer()


def who_was_replaced_changes_nothing(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    scene.ready(0, task="code")
    entry, bad = scene.take(1, math=1, code=1).entries
    scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad")
    old = scene.trainer
    old_producer = scene.producer
    scene.open_trainer(lineage="l2", take_over=True)
    scene.open_producer(take_over=True)
    run = scene.run
    cursor = scene.run.jobs.cursor("math")
    before = scene.dump()
    moves: list[Callable[[], Any]] = [
        lambda: run.ledger.take(old, 1, {"math": 1}),
        lambda: run.ledger.take(old, 2, {"math": 1}),
        lambda: run.ledger.commit(old, 1, 1),
        lambda: run.ledger.quarantine(old, 1, entry, "bad"),
        lambda: run.ledger.set_target(old, "quiz", 0, 5),
        lambda: run.control.set_mode("trainer", Mode.ABORT, nonce=old),
        lambda: run.control.publish_weights(old, PolicyVersion("zombie", 1), "/w", ""),
        lambda: run.control.renew_role("trainer", old),
        lambda: run.control.renew_role("producer", old_producer),
        lambda: run.jobs.enqueue(old_producer, new_nonce(), "math", cursor, [0], 99),
        lambda: run.jobs.reissue(old_producer, "math", "aborted", 99),
        lambda: run.task_stops.publish(old_producer, "math", TaskStop("enough", 9)),
        lambda: run.trainers.rescore(old, 0),
        lambda: run.ledger.refill(old, 1),
    ]
    for number, move in enumerate(moves):
        with pytest.raises(Fenced):
            move()
        assert scene.dump() == before, number


def nothing_too_stale_is_taken(scene: Scene) -> None:
    """Staleness 2 is too much, and nobody has swept: at step 3 weights 0 are too old, weights 1 are
    not.
    """
    scene.open_trainer(lineage="l0")
    gids = scene.ready(0, 0, 0, 1, 1)
    bad = [scene.take(step) for step in (1, 2)][1].entries[0]
    assert scene.take(3, strict=False, math=9).gids == gids[3:4] + gids[4:]
    scene.ready(0, 0)
    scene.try_take(4)
    # quarantined out of step 2, which may use weights 0; out of step 3 nothing is left
    assert len(scene.run.ledger.quarantine(scene.trainer, 2, bad, "bad").gids) == 1
    bad = scene.take(3).entries[0]
    assert len(scene.run.ledger.quarantine(scene.trainer, 3, bad, "bad").gids) == 1
    assert isinstance(scene.run.ledger.refill(scene.trainer, 3), NotReady)


def weights_that_were_forked_away_count_as_the_fork(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    early = scene.ready(5, 0)[0]
    scene.open_trainer(0, "l2", take_over=True)
    late = scene.ready(7)[0]
    assert dict(scene.pool("completed")) == dict.fromkeys([early, late], 0.0) | {
        scene.pool("completed")[1][0]: 0.0
    }
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, PolicyVersion("l2", 3))
    assert dict(scene.pool("completed"))[job.gid] == 3.0


def a_new_trainer_takes_nothing_before_the_pools_are_clamped(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(5)
    trainers: Any = scene.run.trainers
    trainers.rescore = lambda *_: None  # the trainer dies here
    nonce = new_nonce()
    trainers.open(nonce, step=0, lineage="l2", take_over=True)
    scene.trainer = nonce
    assert scene.try_take(1).recovering
    del trainers.rescore
    trainers.rescore(nonce, 0)
    scene.take(1)


def a_fork_counts_although_its_trainer_died_before_it_clamped(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    early, other = scene.ready(5, 0)
    scene.raw.hset(scene.keys.ledger("train"), "taken", 4)
    trainers: Any = scene.run.trainers
    trainers.rescore = lambda *_: None  # the trainer dies here
    trainers.open(new_nonce(), step=1, lineage="l2", take_over=True)
    del trainers.rescore
    scene.open_trainer(4, "l3", take_over=True)
    late = scene.ready(5)[0]
    assert dict(scene.pool("completed")) == {other: 0.0, early: 1.0, late: 1.0}
    assert scene.record(early)["version"] == "1"


def expiring_leaves_what_may_still_be_used(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 1, 2)
    scene.raw.hset(scene.keys.ledger("train"), "taken", 2)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    assert sorted(score for _, score in scene.pool("completed")) == [1.0, 2.0]


def a_group_is_as_old_as_its_oldest_token(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(2)
    first, second = scene.claim(2)
    for job, versions in ((first, (4, 1)), (second, (2, 3))):
        group = scene.run.buffer.read(job.payload)
        for version in versions:
            group = extend(group, Status.COMPLETED, PolicyVersion("l0", version))
        scene.run.buffer.submit("w0", job, group, 8)
    assert scene.pool("completed") == [(first.gid, 1.0), (second.gid, 2.0)]
    assert [scene.record(job.gid)["version"] for job in (first, second)] == ["1", "2"]


def the_oldest_of_several_lineages_counts(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    scene.open_trainer(0, "l2", take_over=True)
    scene.enqueue(1)
    (job,) = scene.claim()
    group = extend(scene.run.buffer.read(job.payload), Status.COMPLETED, PolicyVersion("l2", 1))
    group = extend(group, Status.COMPLETED, PolicyVersion("l0", 3))
    scene.run.buffer.submit("w0", job, group, 8)
    assert scene.pool("completed") == [(job.gid, 0.0)]
    assert (scene.record(job.gid)["version"], scene.record(job.gid)["lineage"]) == ("0", "l0")


def a_fork_counts_for_groups_in_a_batch(scene: Scene) -> None:
    """No fork can move a group meanwhile, and of several forks only the newest would be clamped
    afterwards.
    """
    scene.open_producer()
    trainer = Trainer(scene)
    bad, other = scene.ready(3, 3, lineage=scene.trainer[:8])
    scene.take(1)
    trainer.open()
    swap_out_and_forget_it(scene, trainer)
    # the weights that made it were forked away at step 0; the trainer that is there now opened at
    # step 1
    assert scene.pool("completed") == [(bad, -(scene.run.limits.token_lead("math") or 0))]
    assert scene.record(bad)["version"] == "0"
    assert scene.take(1).gids == [other]
    scene.check()


def swap_out_and_forget_it(scene: Scene, trainer: Trainer) -> None:
    """The first group of batch 1 is found bad and step 1 is trained without it; the server only
    knows it with it.
    """
    moment = trainer.now()
    bad = scene.take(1).entries[0]
    trainer.position.add(scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad"))
    trainer.save(keep=0)
    trainer.lose_all_since(moment)
    assert trainer.open().recovery.dissolved == 1
