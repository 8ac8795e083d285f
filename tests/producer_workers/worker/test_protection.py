"""Which groups an abort waits for, and for how long."""

from __future__ import annotations

from buffer.job import Job, PayloadRef
from buffer.model.limits import RunLimits, TaskLimits
from producer_workers.worker.held_groups import Protection

TASKS = {
    "math": TaskLimits(),
    "code": TaskLimits(tail_batch_max_tries=1),
    "quiz": TaskLimits(eval_of="math"),
}


def job(task: str, aborts: int) -> Job:
    gid = f"{task}-{aborts:010d}"
    return Job(gid, "token", "resume", 1, PayloadRef(gid, "init", 1, 0, ""), aborts)


JOBS = [job(task, aborts) for task in TASKS for aborts in range(4)]


def test_groups_are_spared_by_how_often_they_were_interrupted_and_evaluations_never() -> None:
    limits = RunLimits(tasks=TASKS, tail_batch_max_tries=2)
    spared = Protection(limits).spared(1, JOBS, 0.0)
    assert sorted(gid[:4] + gid[-1] for gid in spared) == [
        "code1",
        "code2",
        "code3",
        "math2",
        "math3",
    ]
    assert Protection(RunLimits(tasks={"math": TaskLimits()})).spared(1, JOBS[:4], 0.0) == set()


def test_each_abort_is_held_up_for_half_of_the_pause_timeout_at_most() -> None:
    protection = Protection(RunLimits(tasks=TASKS, tail_batch_max_tries=2, pause_timeout_s=10.0))
    assert protection.spared(7, JOBS, 100.0)
    assert protection.spared(7, JOBS, 104.9)
    assert not protection.spared(7, JOBS, 105.0)
    assert protection.spared(8, JOBS, 105.1)
