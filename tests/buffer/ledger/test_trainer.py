"""The opening of a trainer: restarts, take-overs, forks of the weights (I6, I7, I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import Fenced, LostRun, RoleHeld
from buffer.ids import new_nonce
from buffer.manifest import NotReady
from tests.buffer.scene import Scene


def test_trainer_is_refused_while_another_beats_unless_it_takes_over(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(role_timeout_ms=60_000)
    first = scene.open_trainer()
    with pytest.raises(RoleHeld, match="trainer"):
        scene.open_trainer(lineage="l2")
    assert scene.raw.hget(scene.keys.control, "trainer") == first.encode()
    scene.raw.hset(scene.keys.control, "trainer_seen_ms", scene.now_ms() - 60_001)
    second = scene.open_trainer(lineage="l2")
    third = scene.open_trainer(lineage="l3", take_over=True)
    assert scene.raw.hget(scene.keys.control, "trainer") == third.encode()
    with pytest.raises(Fenced):
        scene.run.control.renew_role("trainer", second)
    scene.run.control.renew_role("trainer", third, closing=True)
    scene.run.control.renew_role("trainer", third, closing=True)
    scene.open_trainer(lineage="l4")


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
