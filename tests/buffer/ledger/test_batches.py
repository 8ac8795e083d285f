"""take, commit and refresh (I4, I5, I6, I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.config.assignments import parse_settings
from buffer.errors import ConfigError, LostRun
from buffer.ids import new_nonce
from buffer.job import Job
from buffer.ledger.position import Position
from buffer.manifest import Manifest, NotReady
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.scene import FIRST, Scene, rollout


def test_take_of_no_groups_answers_at_once_and_leaves_the_step_open(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0)
    before = scene.dump()
    for counts in ({}, {"math": 0}):
        answer = scene.run.ledger.take(scene.trainer, 1, counts)
        assert isinstance(answer, Manifest)
        assert (answer.step, answer.entries, answer.is_recorded) == (1, (), False)
    assert scene.dump() == before
    first = scene.take(1, math=1)
    assert scene.run.ledger.take(scene.trainer, 1, {}) == first


@pytest.mark.parametrize("counts", [{"maths": 1}, {"math": 1, "quiz": 0}, {"math": -1}])
def test_take_refuses_what_a_training_batch_cannot_have(
    scene: Scene, counts: dict[str, int]
) -> None:
    scene.open_trainer()
    with pytest.raises(ConfigError, match=r"can(not)? be taken"):
        scene.run.ledger.take(scene.trainer, 1, counts)


def test_groups_without_tokens_never_age(scene: Scene) -> None:
    scene.open_trainer()
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, None)
    assert scene.pool("completed") == [(job.gid, float("inf"))]
    scene.raw.hset(
        scene.keys.ledger("train"),
        mapping=dict.fromkeys(("taken", "committed", "freed", "forgotten"), 50),
    )
    assert scene.run.buffer.refresh_staleness("math") == {"math": 0}
    assert scene.take(51).entries[0].version is None
    scene.check()


Make = Callable[..., Scene]


@pytest.fixture
def waiting(make_scene: Make) -> tuple[Scene, Job]:
    """Step 1 is taken, groups live for 2 steps, and one of step 0's weights runs."""
    scene = make_scene(stale_threshold=2, on_straggler="wait")
    scene.open_trainer()
    scene.ready(0, 1, 1, lineage="l1")
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.beat([job], oldest=FIRST)
    assert scene.take(1, math=1).gids
    return scene, job


def test_a_step_waits_for_a_group_that_could_serve_no_later_one(waiting: tuple[Scene, Job]) -> None:
    scene, straggler = waiting
    answer = scene.try_take(2, math=2)
    assert answer.awaits_stragglers
    assert answer.missing == {"math": (2, 2)}
    scene.submit(straggler, FIRST)
    assert straggler.gid in scene.take(2, math=2).gids  # the oldest is taken first
    scene.check()


def test_a_group_of_newer_weights_holds_nobody_up(waiting: tuple[Scene, Job]) -> None:
    scene, straggler = waiting
    scene.submit(straggler, FIRST)
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.beat([job], oldest=PolicyVersion("l1", 1))
    assert len(scene.take(2, math=2).gids) == 2


def test_nobody_waits_for_a_dead_worker(waiting: tuple[Scene, Job]) -> None:
    scene, straggler = waiting
    scene.expire_leases("w0")
    scene.run.janitor.sweep()
    assert scene.stream("resume") == [straggler.gid]
    assert straggler.gid not in scene.take(2, math=2).gids


def test_the_setting_may_change_while_the_trainer_waits(waiting: tuple[Scene, Job]) -> None:
    scene, straggler = waiting
    assert scene.try_take(2, math=2).awaits_stragglers
    scene.run.set(parse_settings(LiveSettings, ["on_straggler=drop"]))
    taken = scene.take(2, math=2)
    assert straggler.gid not in taken.gids
    scene.run.set(parse_settings(LiveSettings, ["on_straggler=wait"]))
    assert scene.take(2, math=2) == taken  # a recorded batch is what it was


def test_what_is_ready_is_taken_if_the_trainer_asks_for_no_more(waiting: tuple[Scene, Job]) -> None:
    scene, _ = waiting
    assert len(scene.take(2, strict=False, math=2).gids) == 2


def test_a_group_that_was_trained_in_a_later_step_is_let_go_by_an_earlier_batch(
    scene: Scene,
) -> None:
    """Quarantine a group of batch 1, train it in step 2; then the server loses it all."""
    scene.open_producer()
    trainer = Trainer(scene)
    again, _ = scene.ready(0, 0)
    scene.take(1)
    moment = trainer.now()
    bad = scene.take(1).entries[0]
    trainer.position.add(scene.run.ledger.quarantine(scene.trainer, 1, bad, "bad"))
    scene.run.jobs.requeue(again)
    (job,) = scene.claim()
    scene.submit(job)
    second = trainer.train(2)
    trainer.save(keep=1)
    payload = {key: value for key, value in trainer.now().items() if job.token in key}
    trainer.lose_all_since(moment | payload)
    recovery = trainer.open().recovery
    assert (recovery.dissolved, recovery.restored, recovery.oldest) == (1, 1, 1)
    assert scene.take(2) == second
    assert [scene.run.account.stages("math", draw) for draw in (0, 1)] == [["taken"], ["archived"]]
    scene.check()


def test_a_batch_of_other_bytes_is_another_batch(scene: Scene) -> None:
    """The same groups, but one of them was replaced in the line of history that was trained."""
    scene.open_producer()
    trainer = Trainer(scene)
    (gid,) = scene.ready(0)
    ready = trainer.now()
    scene.take(1)
    taken = trainer.now()
    trainer.lose_all_since(ready)
    trainer.open()
    scene.run.buffer.update(gid, [rollout(Status.COMPLETED, FIRST, response="better")])
    trained = trainer.train(1)
    trainer.save(keep=0)
    token = trained.entries[0].payload.token
    trainer.lose_all_since(
        taken | {key: value for key, value in trainer.now().items() if token in key}
    )
    recovery = trainer.open().recovery
    assert (recovery.dissolved, recovery.restored) == (1, 1)
    trainer.open(Position())
    assert scene.take(1) == trained
    assert scene.run.buffer.read(trained.entries[0].payload).states[0].response == "better"
    scene.check()


def test_trainer_is_refused_when_the_server_holds_another_run(scene: Scene) -> None:
    with pytest.raises(LostRun, match="this server holds run"):
        scene.open_trainer(run_nonce=new_nonce())
    with pytest.raises(LostRun):
        scene.open_producer(run_nonce=new_nonce())
    scene.raw.unlink(scene.keys.meta)
    with pytest.raises(LostRun, match="no run of that name"):
        scene.open_trainer()
    assert scene.raw.hget(scene.keys.control, "trainer") is None


def test_evaluation_has_batches_of_its_own_and_touches_no_training_counter(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0)
    before = scene.counters()
    scene.run.ledger.set_target(scene.trainer, "quiz", 0, 2)
    scene.run.ledger.set_target(scene.trainer, "quiz", 0, 1)
    assert scene.counters("quiz")["target"] == "2"
    assert scene.enqueue(3, task="quiz", target=None).count == 2
    for job in scene.claim(2):
        assert job.lane == "eval"
        scene.submit(job)
    ledger = scene.run.evaluations
    manifest = ledger.take(scene.trainer, 1, {"quiz": 2})
    assert not isinstance(manifest, NotReady)
    assert scene.run.evaluations.steps() == (1, 0, 0)
    assert scene.run.ledger.steps() == (0, 0, 0)
    scene.check()
    ledger.commit(scene.trainer, 1, 1)
    assert scene.counters() == before
    assert scene.counters("quiz")["archived"] == "2"
    scene.check()
