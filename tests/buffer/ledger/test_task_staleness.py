"""Each task may have a staleness limit of its own, with the run's as default (I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.config.assignments import parse_settings
from buffer.errors import ConfigError
from buffer.limits import TaskLimits
from buffer.manifest import NotReady
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.invariants.batches import swap_out_and_forget_it
from tests.buffer.scene import Scene

Make = Callable[..., Scene]

TASKS = {"math": TaskLimits(), "code": TaskLimits(stale_threshold=4)}


def change(run: Run, *assignments: str) -> None:
    run.set(parse_settings(LiveSettings, assignments))


def test_a_batch_and_its_substitutes_keep_to_the_limit_of_their_task(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=1, tasks=TASKS, on_straggler="retry")
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    scene.ready(0, 0, 0)
    (old, spare) = scene.ready(0, 0, task="code")
    assert scene.try_take(2, math=1, code=1).missing == {"math": (0, 1), "code": (2, 1)}
    (fresh,) = scene.ready(1, lineage="l1")
    manifest = scene.take(2, math=1, code=1)
    assert manifest.gids == [fresh, old]
    assert " cut=math=1,code=-2 " in manifest.header
    # a substitute is as young as the batch required of its task
    assert scene.run.ledger.quarantine(scene.trainer, 2, manifest.entries[0], "bad").gids == [old]
    manifest = scene.run.ledger.quarantine(scene.trainer, 2, manifest.entries[1], "bad")
    assert manifest.gids == [spare]
    scene.ready(0)
    assert scene.run.ledger.refill(scene.trainer, 2) == NotReady({"math": (0, 1)})
    assert scene.run.buffer.refresh_staleness() == {"math": 4, "code": 0}
    scene.check()


def test_a_change_of_a_task_survives_a_change_of_the_run(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=1, tasks=TASKS)
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    scene.ready(0)
    scene.ready(0, task="code")
    other = Run.open(scene.store, scene.name)
    assert [sizes.stale for sizes in other.buffer.count_statuses().values()] == [1, 0]
    change(scene.run, "tasks.code.max_staleness=0")
    change(scene.run, "max_staleness=3")
    other.refresh_limits()
    assert [other.limits.threshold(task) for task in ("math", "code")] == [4, 1]
    assert [sizes.stale for sizes in other.buffer.count_statuses().values()] == [0, 1]
    assert other.buffer.refresh_staleness() == {"math": 0, "code": 1}


def test_the_ages_of_tokens_follow_the_limit_of_their_task_through_a_fork(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=3, token_threshold=2, tasks=TASKS)
    scene.open_producer()
    trainer = Trainer(scene)
    weights = PolicyVersion(scene.trainer[:8], 3)
    for task in ("code", "math"):
        scene.ready(weights.version, task=task, lineage=weights.lineage)
    trainer.open()
    assert scene.pool("completed", "code")[0][1] == -2
    assert scene.pool("completed", "math")[0][1] == -1
    with pytest.raises(ConfigError, match="max_token_staleness"):
        change(scene.run, "tasks.math.max_staleness=4")


def test_a_dissolved_batch_returns_to_the_ages_of_its_task(make_scene: Make) -> None:
    tasks = {"math": TaskLimits(stale_threshold=5), "code": TaskLimits()}
    scene = make_scene(stale_threshold=3, token_threshold=2, tasks=tasks)
    scene.open_producer()
    trainer = Trainer(scene)
    bad, _ = scene.ready(3, 3, lineage=scene.trainer[:8])
    scene.take(1)
    trainer.open()
    swap_out_and_forget_it(scene, trainer)
    assert scene.pool("completed") == [(bad, -3)]
    scene.check()


def test_a_refresh_expires_the_statuses_that_it_is_asked_for(make_scene: Make) -> None:
    scene = make_scene(stale_threshold=1, tasks=TASKS, tail_batch_trigger_size=0)
    scene.open_trainer()
    scene.ready(0, 1, lineage="l1")
    scene.raw.hset(scene.keys.ledger("train"), "taken", 1)
    refresh = scene.run.buffer.refresh_staleness
    assert refresh(statuses=[Status.ABORTED]) == {"math": 0, "code": 0}
    assert refresh("code", statuses=["completed"]) == {"code": 0}
    assert refresh("math", statuses=[Status.COMPLETED]) == {"math": 1}
    for wrong in ([Status.EXPIRED], "completed"):
        with pytest.raises(ConfigError, match="statuses: completed, aborted"):
            refresh(statuses=wrong)
