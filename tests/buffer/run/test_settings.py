"""Settings that change while a run goes on: checked, versioned, heard by every handle, and by no
step too early.
"""

from __future__ import annotations

import pytest

from buffer.config.assignments import parse_settings
from buffer.errors import ConfigError
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from tests.buffer.scene import Scene


def wanted(*assignments: str) -> LiveSettings:
    return parse_settings(LiveSettings, assignments)


def test_a_change_is_heard_by_every_part_of_another_handle(scene: Scene) -> None:
    other = Run.open(scene.store, scene.name)
    changes = scene.run.set(
        wanted("max_staleness=4", "max_tries=9", "tasks.code.over_sample_threshold=0.5")
    )
    assert changes == {
        "max_staleness": (1, 4),
        "max_tries": (3, 9),
        "tasks.code.over_sample_threshold": (None, 0.5),
    }
    assert other.limits.max_tries == 3
    assert other.refresh_limits()
    assert not other.refresh_limits()
    assert other.limits.stale_threshold == 5
    assert other.limits.setting("code", "over_sample_threshold") == 0.5
    assert other.limits.setting("math", "over_sample_threshold") == 0
    scene.run.set(wanted("over_sample_threshold=2", "tasks.code.tail_batch_trigger_size=1"))
    other.refresh_limits()
    assert other.limits.setting("code", "over_sample_threshold") == 0.5
    assert other.limits.setting("math", "over_sample_threshold") == 2
    assert Run.open(scene.store, scene.name).limits == scene.run.limits == other.limits
    assert [e for e in scene.raw.xrevrange(scene.keys.events) if e[1][b"event"] == b"set"]


def test_two_who_change_at_once_do_not_undo_each_other(scene: Scene) -> None:
    other = Run.open(scene.store, scene.name)
    scene.run.set(wanted("max_tries=7"))
    other.set(wanted("steps=50"))
    scene.run.refresh_limits()
    assert (scene.run.limits.max_tries, scene.run.limits.steps) == (7, 50)
    assert scene.raw.hget(scene.keys.meta, "limits_version") == b"2"


def test_new_weights_hold_from_the_first_step_without_a_target(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0)
    scene.take(1)
    scene.run.set(wanted("tasks.math.weight=3", "tasks.code.weight=1"))
    mix = scene.run.limits.mix()
    # step 1 is taken, and weights 1 may serve steps 2 and 3
    assert [mix.shares(step)["math"] for step in (3, 4)] == [8, 12]
    scene.run.set(wanted("tasks.code.weight=0"))
    assert [scene.run.limits.mix().shares(step)["math"] for step in (3, 4)] == [8, 16]


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("max_stalenes=1", "did you mean `max_staleness`?"),
        ("max_staleness=-1", "max_staleness = -1"),
        ("tasks.history.weight=1", "no training task 'history'"),
        ("tasks.quiz.weight=1", "no training task 'quiz'"),
        ("concurrency", "expected section.key=value"),
    ],
)
def test_a_wrong_setting_is_named_and_changes_nothing(
    scene: Scene, assignment: str, told: str
) -> None:
    before = scene.dump()
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        scene.run.set(wanted(assignment))
    assert scene.dump() == before


def test_no_task_left_with_a_weight_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="no training task would have a weight"):
        scene.run.set(wanted("tasks.math.weight=0", "tasks.code.weight=0"))
