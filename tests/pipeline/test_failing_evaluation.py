"""An evaluation whose groups fail ends: it draws its problems twice at most, and says why."""

from __future__ import annotations

import json
from pathlib import Path

from buffer.model.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.wire.sampling import SampleParams
from producer_workers.datasets.files import JsonlDataset
from producer_workers.producer.producer import AgentLoopManager
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import EvaluationStrategy
from tests.buffer.scene import Scene
from tests.pipeline.yard import Letters

TASKS = {"math": TaskLimits(), "quiz": TaskLimits(eval_of="math")}


def fail_most(scene: Scene, producer: AgentLoopManager) -> int:
    """Produce and claim until nothing is started any more; every third group is completed.

    Returns the number of claimed groups.
    """
    claimed = 0
    while True:
        producer.round(producer.role.renew())
        jobs = scene.claim(128)
        if not jobs:
            return claimed
        for job in jobs:
            claimed += 1
            if claimed % 3:
                scene.run.jobs.release("w0", job, "failed", "KeyError: 'solution'")
            else:
                scene.submit(job)


def test_an_evaluation_of_which_most_fails_ends_and_is_continued(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(6)))
    store = Store("memory://")
    scene = Scene(store, store.control, "demo", RunLimits(max_tries=1, tasks=TASKS))
    scene.open_trainer()
    sampler = Sampler("quiz", JsonlDataset(rows), Letters(), SampleParams())
    producer = AgentLoopManager(scene.run, {"quiz": sampler}, {"quiz": EvaluationStrategy()})
    scene.run.evaluations.set_target(scene.trainer, "quiz", 6)
    with producer.opened():
        assert fail_most(scene, producer) == 12
        reason = scene.run.task_stops.of("quiz").reason
        assert "twice the problems" in reason
        assert "lacks 2 groups: 8 are dead letters" in reason
        assert "KeyError: 'solution'" in reason
        scene.run.jobs.resume_task("quiz")
        assert fail_most(scene, producer) == 6
    assert scene.run.buffer.count("quiz") == 6
    scene.check()
