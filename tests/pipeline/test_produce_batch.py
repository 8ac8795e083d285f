from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.control.control import Mode
from buffer.control.progress import TaskProgress
from buffer.control.task_status import ProduceBatchStatus, TaskStop
from buffer.errors import NoBatch, RoleHeld, TaskStopped
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from producer_workers.datasets.files import JsonlDataset
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import EvaluationStrategy
from tests.buffer.scene import Scene
from tests.pipeline.mixture import Mixture
from tests.pipeline.yard import Letters

STATUS = ProduceBatchStatus


def test_a_users_own_loop_calls_the_parts_one_by_one(make_mixture: Callable[..., Mixture]) -> None:
    """Produce exactly what three batches need, with weights 5:2:0 of 7, counted for each call."""
    site = make_mixture()
    working = threading.Event()

    def work() -> None:
        while not working.wait(0.005):
            site.work()

    workers = threading.Thread(target=work)
    workers.start()
    try:
        with site.manager.opened():
            for step in (1, 2, 3):
                made = site.manager.produce_batch(step, deadline_s=400.0)
                assert made.status is STATUS.NORMAL
                assert {task: counts.enqueued for task, counts in made.made.items()} == {
                    "math": 5,
                    "code": 2,
                    "idle": 0,
                }
                assert {task: left.completed for task, left in made.leftovers.items()} == {
                    "math": 5,
                    "code": 2,
                    "idle": 0,
                }
                assert len(site.take(step).groups) == 7
                too_old = site.manager.produce_batch(step + 1)
                assert (too_old.status, too_old.seconds < 60.0) == (STATUS.EXPIRED_BATCH, True)
                site.publish(step)
            site.run.control.set_mode("operator", Mode.KEEP)
            assert site.manager.produce_batch(4).status is STATUS.UPDATE_WEIGHT_AND_ABORT
            site.run.control.set_mode("operator", Mode.FINISH)
            assert site.manager.produce_batch(4).status is STATUS.FINISH
    finally:
        working.set()
        workers.join()
    site.scene.check()


def test_a_batch_that_no_worker_works_on_is_a_timeout_with_what_there_is(
    make_mixture: Callable[..., Mixture],
) -> None:
    site = make_mixture()
    with site.manager.opened():
        with pytest.raises(RoleHeld):
            Producer(site.run, {}, {}).opened().__enter__()
        with pytest.raises(TimeoutError, match="step 1 is not ready"):
            site.manager.produce_batch(1, deadline_s=0.0)


def test_a_broken_task_stops_alone_until_it_is_resumed(
    make_mixture: Callable[..., Mixture],
) -> None:
    site = make_mixture()
    site.run.task_stops.are_final = True
    site.rows["math"].broken = ZeroDivisionError("row of a user")
    with site.manager.opened():
        site.rounds()
        assert site.ready() == {"math": 0, "code": 2, "idle": 0}
        with pytest.raises(
            TaskStopped, match=r"math is stopped: .*ZeroDivisionError: row of a user"
        ) as caught:
            site.take(1)
        assert "rolloutmq resume --task math" in caught.value.hint
        with pytest.raises(TaskStopped, match="math is stopped"):
            site.manager.produce_batch(1)
        site.run.task_stops.are_final = False
        with pytest.raises(TimeoutError, match="math is stopped"):
            site.manager.produce_batch(1, deadline_s=0.2)
        # the others are not held up, unless a batch of all is asked for
        assert len(site.consumer.take_batch(1, {"code": 2}).groups) == 2
        site.publish(1)
        site.rows["math"].broken = None
        site.rounds()
        assert site.ready()["math"] == 0
        site.run.jobs.resume_task("math")
        site.rounds()
        assert site.ready()["math"] == 5
        # what is ready is enough for this batch
        site.run.task_stops.publish(site.manager.nonce, "math", TaskStop("broken", 0, "again"))
        assert len(site.take(2).groups) == 7
        site.run.jobs.resume_task("math")
    assert not site.run.task_stops.of("math").kind
    site.scene.check()


def test_a_slow_task_holds_up_no_other(make_mixture: Callable[..., Mixture]) -> None:
    """Submit nothing of math: code continues, step after step, as far as its weights allow."""
    site = make_mixture()
    with site.manager.opened():
        for step in (1, 2, 3):
            site.rounds(code=9)
            assert site.ready() == {"math": 0, "code": 2, "idle": 0}
            batch = site.consumer.take_batch(
                step, {"math": 5, "code": 2}, strict=False, deadline_s=400.0
            )
            assert [group.task for group in batch.groups] == ["code", "code"]
            site.publish(step)
    site.scene.check()


def test_enough_is_a_batch_of_what_there_is_and_is_not_made_up_for(
    make_mixture: Callable[..., Mixture],
) -> None:
    def three(completed: int, wanted: int, *, progress: TaskProgress) -> bool:
        return completed < 3

    site = make_mixture(should_continue={"math": three})
    with site.manager.opened():
        for step in (1, 2):
            site.round()
            site.work(code=2, math=3)
            assert site.ready() == {"math": 3, "code": 2, "idle": 0}
            left = site.run.account.totals()
            assert site.manager.produce_batch(step, deadline_s=400.0).status is STATUS.NORMAL
            assert site.run.account.totals() == left
            assert len(site.take(step).groups) == 5
            site.publish(step)
            for job in site.scene.claim(9, weights=PolicyVersion(site.consumer.lineage, step)):
                site.run.jobs.release("w0", job, "aborted")
    assert site.run.read_progress().tasks["math"].consumed == 6
    site.scene.check()


def test_enough_of_nothing_is_an_error_and_no_empty_batch(
    make_mixture: Callable[..., Mixture],
) -> None:
    site = make_mixture(should_continue=dict.fromkeys(("math", "code"), lambda *_, **__: False))
    with site.manager.opened():
        site.rounds()
        with pytest.raises(NoBatch, match="should_continue_fn"):
            site.take(1)


# -- failing evaluation ------------------------------


WITH_QUIZ = {"math": TaskLimits(), "quiz": TaskLimits(eval_of="math")}


def fail_most(scene: Scene, producer: Producer) -> int:
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


def test_an_evaluation_of_which_most_fails_ends_without_other_problems(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(6)))
    store = Store("memory://")
    scene = Scene(store, store.client, "demo", RunLimits(max_tries=1, tasks=WITH_QUIZ))
    scene.open_trainer()
    sampler = Sampler("quiz", JsonlDataset(rows), Letters(), SampleParams())
    producer = Producer(scene.run, {"quiz": sampler}, {"quiz": EvaluationStrategy()})
    for round_number in (1, 2):
        draws = 6 * (round_number - 1), 6 * round_number
        scene.run.evaluations.set_target(scene.trainer, "quiz", *draws)
        with producer.opened():
            assert fail_most(scene, producer) == 6
        assert scene.run.buffer.count("quiz") == 2 * round_number
    assert scene.run.jobs.cursor("quiz") == 12
    scene.check()
