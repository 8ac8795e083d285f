"""A batch that is not of the trainer's history is let go: how old its groups are then (I8).

The first test is what the machine of tests/buffer/histories found, once it lost changes of batches
often, cut short.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.ledger.position import Position
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.invariants.batches import (
    a_fork_counts_for_groups_in_a_batch,
    swap_out_and_forget_it,
)
from tests.buffer.scene import FIRST, Scene, rollout


@pytest.mark.parametrize("tokens", [None, 2])
def test_a_fork_since_the_batch_was_taken_counts(
    make_scene: Callable[..., Scene], tokens: int | None
) -> None:
    a_fork_counts_for_groups_in_a_batch(make_scene(stale_threshold=3, token_threshold=tokens))


@pytest.mark.parametrize(("tokens", "score"), [(None, 0), (2, -1)])
def test_tokens_without_a_record_count_as_old_as_they_may_be(
    make_scene: Callable[..., Scene], tokens: int | None, score: int
) -> None:
    """Restore a batch with bytes whose submit the server lost.

    No manifest states whose tokens they are.
    """
    scene = make_scene(stale_threshold=3, token_threshold=tokens)
    scene.open_producer()
    trainer = Trainer(scene)
    scene.enqueue(1)
    (job,) = scene.claim()
    running = trainer.now()
    scene.submit(job, PolicyVersion(scene.trainer[:8], 3))
    payload = {key: value for key, value in trainer.now().items() if job.token in key}
    trainer.train(1)
    trainer.save(keep=0)
    trainer.lose_all_since(running | payload)
    assert trainer.open().recovery.restored == 1
    trainer.open(Position())
    swap_out_and_forget_it(scene, trainer)
    assert scene.pool("completed") == [(job.gid, score)]
    scene.check()


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
