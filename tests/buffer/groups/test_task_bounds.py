from __future__ import annotations

from collections.abc import Callable

from buffer.job import Job
from buffer.limits import TaskLimits
from buffer.run.settings import LiveSettings, LiveTaskSettings
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


def failures(scene: Scene, task: str = "math") -> tuple[int, bool]:
    counters = scene.run.progress(task)
    return int(counters.get("failures_in_row", 0)), scene.run.task_stops.of(task).is_stopped


def fail(scene: Scene, job: Job, worker: str = "w0", reason: str = "KeyError: 'solution'") -> None:
    scene.run.jobs.release(worker, job, "failed", reason)


def test_a_task_is_stopped_after_failures_in_a_row_and_forgiven_by_hand(
    make_scene: MakeScene,
) -> None:
    scene = bounded(make_scene, max_consecutive_failures=3)
    scene.enqueue(5)
    for count, job in enumerate(scene.claim(3), start=1):
        assert scene.enqueue(0).refusal == ""
        fail(scene, job)
        assert failures(scene) == (count, count == 3)
    reason = "3 tries in a row failed: KeyError: 'solution'"
    assert scene.run.task_stops.of("math").reason == reason
    assert scene.enqueue(1).refusal == "STOPPED"
    assert scene.enqueue(2, task="code").count == 2
    # what waits keeps its tries until the cause is fixed
    assert [job.task for job in scene.claim(4)] == ["code", "code"]
    scene.run.jobs.resume_task("math")
    assert failures(scene) == (0, False)
    assert scene.enqueue(1).count == 1
    assert [job.task for job in scene.claim(4)] == ["math"] * 3
    scene.check()


def test_filtered_groups_stop_a_task_only_where_that_is_asked_for(make_scene: MakeScene) -> None:
    """Their code works: a hard task may filter for long, and is healthy."""
    scene = bounded(make_scene)
    scene.enqueue(60)
    for job in scene.claim(60):
        scene.submit(job, filtered=True)
    assert failures(scene) == (0, False)
    scene.run.set(LiveSettings(tasks={"math": LiveTaskSettings(max_consecutive_filtered=62)}))
    scene.enqueue(3)
    good, *others = scene.claim(3)
    for job in others:
        scene.submit(job, filtered=True)
    assert scene.run.task_stops.of("math").reason == "62 groups in a row were filtered"
    scene.submit(good)
    scene.run.jobs.resume_task("math")
    assert failures(scene) == (0, False)
    scene.check()


def test_a_success_begins_the_count_anew(make_scene: MakeScene) -> None:
    scene = bounded(make_scene, max_consecutive_failures=2)
    scene.enqueue(6)
    bad, good, worse, useless, worst, aborted = scene.claim(6)
    fail(scene, bad)
    scene.submit(good)
    fail(scene, worse)
    scene.submit(useless, filtered=True)
    assert failures(scene) == (0, False)
    fail(scene, worst)
    scene.run.jobs.release("w0", aborted, "aborted")
    assert failures(scene) == (1, False)
    scene.enqueue(1)
    fail(scene, scene.claim()[0])
    assert failures(scene) == (2, True)
    assert scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000) == 0


def test_by_default_a_task_ends_after_one_batch_or_three(make_scene: MakeScene) -> None:
    tasks = {"math": TaskLimits(), "code": TaskLimits(), "quiz": TaskLimits(eval_of="math")}
    scene = make_scene(tasks=tasks, max_tries=1, batch_size=20)
    scene.enqueue(10)
    for count, job in enumerate(scene.claim(10), start=1):
        fail(scene, job)
        assert failures(scene) == (count, count == 10)
    scene.run.jobs.resume_task("math")
    scene.ready(0)
    scene.enqueue(30)
    for count, job in enumerate(scene.claim(30), start=1):
        fail(scene, job)
        assert failures(scene) == (count, count == 30)
    # the share shrinks, but no batch is so small that a single bad row ends it
    scene.run.jobs.resume_task("math")
    change = {"math": LiveTaskSettings(weight=0.1), "code": LiveTaskSettings(weight=9)}
    scene.run.set(LiveSettings(tasks=change))
    scene.enqueue(24)
    for count, job in enumerate(scene.claim(24), start=1):
        fail(scene, job)
        assert failures(scene) == (count, count == 24)
    scene.run.jobs.resume_task("math")
    scene.run.set(LiveSettings(tasks={"math": LiveTaskSettings(max_consecutive_failures=0)}))
    scene.enqueue(90)
    for job in scene.claim(90):
        fail(scene, job)
    assert failures(scene) == (90, False)


def test_a_worker_that_alone_is_broken_counts_for_its_share_of_the_fleet(
    make_scene: MakeScene,
) -> None:
    scene = bounded(make_scene, max_consecutive_failures=3)
    for name in ("w0", "w1"):
        scene.worker(name)
    scene.enqueue(9)
    jobs = scene.claim(6)
    for job in jobs[:5]:
        fail(scene, job)
    assert failures(scene) == (5, False)
    (healthy,) = scene.claim(1, worker="w1")
    scene.submit(healthy, worker="w1")
    fail(scene, jobs[5])
    # but what fails everywhere is not the fault of a worker
    for job in scene.claim(2, worker="w1"):
        fail(scene, job, "w1")
    assert failures(scene) == (3, True)


def test_an_evaluation_draws_each_problem_once_whatever_becomes_of_it(
    make_scene: MakeScene,
) -> None:
    """The bound is absolute: it outlives the trainer that asks again, and each producer."""
    scene = bounded(make_scene)
    scene.open_trainer()
    ledger = scene.run.evaluations
    for _ in range(2):
        ledger.set_target(scene.trainer, "quiz", 0, 6)
        scene.open_trainer(take_over=True)
    assert scene.enqueue(9, task="quiz", target=None).cursor == 6
    for _ in range(scene.run.limits.max_tries):
        for n, job in enumerate(scene.claim(6)):
            scene.submit(job) if n else fail(scene, job)
    assert (scene.counters("quiz")["dead"], scene.run.buffer.count("quiz")) == ("1", 5)
    assert scene.enqueue(9, task="quiz", target=None).count == 0
    ledger.set_target(scene.trainer, "quiz", 6, 12)
    ledger.set_target(scene.trainer, "quiz", 0, 6)  # of a call that came late
    assert (scene.counters("quiz")["begins"], scene.counters("quiz")["target"]) == ("6", "12")
    assert scene.enqueue(9, task="quiz", target=None).cursor == 12
    scene.check()
