"""The bounds of a task: groups in flight, and failures in a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.model.limits import TaskLimits
from tests.buffer.scene import Scene

MakeScene = Callable[..., Scene]


def bounded(make_scene: MakeScene, **bounds: int) -> Scene:
    tasks = {"math": TaskLimits(**bounds), "code": TaskLimits(), "quiz": TaskLimits(eval_of="math")}
    return make_scene(tasks=tasks, max_tries=1)


def test_no_more_groups_are_started_than_may_be_in_flight(make_scene: MakeScene) -> None:
    scene = bounded(make_scene, max_in_flight=5)
    assert scene.enqueue(8).count == 5
    first = scene.claim(3)
    assert scene.enqueue(8).count == 0
    scene.submit(first[0])
    scene.submit(first[1])
    assert scene.enqueue(8).count == 2
    assert scene.enqueue(8, task="code").count == 8
    scene.check()


def test_begun_groups_wait_in_their_pool_when_too_many_are_in_flight(make_scene: MakeScene) -> None:
    scene = bounded(make_scene, max_in_flight=2)
    scene.enqueue(2)
    for job in scene.claim(2):
        scene.run.jobs.release("w0", job, "aborted")
    scene.enqueue(1)
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 1
    scene.check()


@pytest.mark.parametrize("filtered", [False, True])
def test_a_task_is_stopped_after_failures_in_a_row_and_forgiven_by_hand(
    make_scene: MakeScene, filtered: bool
) -> None:
    scene = bounded(make_scene, max_consecutive_failures=3)
    scene.enqueue(4)
    for count, job in enumerate(scene.claim(3), start=1):
        assert scene.enqueue(0).refusal == ""
        if filtered:
            scene.submit(job, filtered=True)
        else:
            scene.run.jobs.release("w0", job, "failed", "broken")
        assert scene.run.jobs.failures("math") == (count, count == 3)
    assert scene.enqueue(1).refusal == "STOPPED"
    assert scene.enqueue(2, task="code").count == 2
    scene.run.jobs.forgive("math")
    assert scene.run.jobs.failures("math") == (0, False)
    assert scene.enqueue(1).count == 1
    scene.check()


def test_a_success_begins_the_count_anew(make_scene: MakeScene) -> None:
    scene = bounded(make_scene, max_consecutive_failures=2)
    scene.enqueue(5)
    bad, good, worse, worst, aborted = scene.claim(5)
    scene.run.jobs.release("w0", bad, "failed")
    scene.submit(good)
    scene.run.jobs.release("w0", worse, "failed")
    scene.run.jobs.release("w0", aborted, "aborted")
    assert scene.run.jobs.failures("math") == (1, False)
    scene.run.jobs.release("w0", worst, "failed")
    assert scene.run.jobs.failures("math") == (2, True)
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 0
