from __future__ import annotations

import pytest

from buffer.control.progress import Leftovers
from tests.buffer.scene import Scene


def test_progress_counts_what_the_scripts_moved(scene: Scene) -> None:
    scene.open_trainer()
    before = scene.run.read_progress()
    scene.ready(0, 0, 0)
    scene.enqueue(1)
    scene.submit(scene.claim()[0], filtered=True)
    scene.take(1, math=2)
    progress = scene.run.read_progress()
    math = progress.since(before)["math"]
    assert (progress.next_consumer_step, math.consumed, math.filtered, math.enqueued) == (
        2,
        2,
        1,
        4,
    )
    assert (math.raw_rewards_sum, math.raw_rewards_count) == (8.0, 8)
    assert (math.produced_samples, math.produced_tokens, math.target) == (8, 16, 1000)
    assert progress.leftovers["math"] == Leftovers(completed=1, aborted=0, expired=0)
    assert set(progress.tasks) == {"math", "code"}


def test_progress_of_an_unknown_task_is_a_key_error(scene: Scene) -> None:
    with pytest.raises(KeyError, match="history"):
        scene.run.read_progress(["math", "history"])
