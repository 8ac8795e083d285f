"""take, commit and refresh (I4, I5, I6, I8)."""

from __future__ import annotations

import pytest

from buffer.errors import ConfigError, LedgerError
from buffer.manifest import Manifest
from tests.buffer.scene import Scene


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


def test_take_refuses_gaps_and_freed_steps(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0, 0, 0)
    with pytest.raises(LedgerError, match="last taken step is 0"):
        scene.take(2)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    with pytest.raises(LedgerError, match="behind the committed step 1"):
        scene.take(1)
    with pytest.raises(LedgerError, match="at most 1024"):
        scene.take(2, math=1025)
    scene.check()


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
