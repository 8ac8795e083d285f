"""A batch that is not of the trainer's history is let go: how old its groups are then (I8).

The first test is what the machine of tests/buffer/machine found, once it lost changes of batches often, cut short.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer import PolicyVersion
from buffer.recovery.position import Position
from tests.buffer.checkpointing import Trainer
from tests.buffer.invariants.batches import a_fork_counts_for_groups_in_a_batch, swap_out_and_forget_it
from tests.buffer.scene import Scene


@pytest.mark.parametrize("tokens", [None, 2])
def test_a_fork_since_the_batch_was_taken_counts(make_scene: Callable[..., Scene], tokens: int | None) -> None:
    a_fork_counts_for_groups_in_a_batch(make_scene(stale_threshold=3, token_threshold=tokens))


@pytest.mark.parametrize(("tokens", "score"), [(None, 0), (2, -1)])
def test_tokens_that_no_record_tells_of_count_as_old_as_they_may_be(
    make_scene: Callable[..., Scene], tokens: int | None, score: int
) -> None:
    """A batch came back with bytes whose submit the server had forgotten: no manifest says whose tokens they are."""
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
