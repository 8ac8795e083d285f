"""A batch that is not of the trainer's history is let go: how old its groups are then (I8).

The first test is what the machine of tests/buffer/histories found, once it lost changes of batches
often, cut short.
"""

from __future__ import annotations

from buffer.ledger.position import Position
from buffer.wire.rollout import Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.scene import FIRST, Scene, rollout


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
