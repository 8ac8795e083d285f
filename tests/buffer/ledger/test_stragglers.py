from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.config.assignments import parse_settings
from buffer.job import Job
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion
from tests.buffer.scene import FIRST, Scene

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
