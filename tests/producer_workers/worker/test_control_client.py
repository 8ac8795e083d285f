"""What a worker adopts of the control states it receives (I10): every answer, and newer hints."""

from __future__ import annotations

from buffer.control.control import ControlState, Mode
from buffer.job import Job, PayloadRef
from buffer.limits import RunLimits, TaskLimits
from buffer.wire.rollout import PolicyVersion
from producer_workers.worker.control_client import ControlView
from producer_workers.worker.held_groups import Protection


def state(epoch: int, mode: Mode = Mode.KEEP, lanes: tuple[str, ...] = ()) -> ControlState:
    return ControlState(epoch, mode, lanes, PolicyVersion("l1", 0), "", "")


def view_at(epoch: int) -> ControlView:
    view = ControlView()
    assert view.receive_answer(state(epoch), 0)
    return view


def test_hint_is_adopted_once_and_only_when_it_is_newer() -> None:
    view = view_at(5)
    assert [view.receive_hint(state(epoch)) for epoch in (6, 6, 4)] == [True, False, False]
    assert view.epoch == 6


def test_answer_to_a_question_from_before_a_hint_does_not_undo_it() -> None:
    view = view_at(5)
    known_epoch = view.epoch
    view.receive_hint(state(6))
    assert not view.receive_answer(state(5, Mode.RUN), known_epoch)
    assert view.epoch == 6


def test_answer_of_a_server_that_rolled_back_is_adopted() -> None:
    view = view_at(9)
    assert view.receive_answer(state(2), 9)
    assert view.epoch == 2


def test_a_receipt_matters_only_where_lanes_are_open_in_a_pause() -> None:
    view = view_at(5)
    assert not view.receive_receipt(5)
    view.receive_hint(state(6, lanes=("eval",)))
    assert [view.receive_receipt(ack) for ack in (5, 6, 6)] == [False, True, False]
    view.receive_hint(state(7, Mode.RUN, lanes=("eval",)))
    assert not view.receive_receipt(7)


# -- protection ------------------------------


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
        "code1", "code2", "code3", "math2", "math3",
    ]  # fmt: skip
    assert Protection(RunLimits(tasks={"math": TaskLimits()})).spared(1, JOBS[:4], 0.0) == set()


def test_each_abort_is_held_up_for_half_of_the_pause_timeout_at_most() -> None:
    protection = Protection(RunLimits(tasks=TASKS, tail_batch_max_tries=2, pause_timeout_s=10.0))
    assert protection.spared(7, JOBS, 100.0)
    assert protection.spared(7, JOBS, 104.9)
    assert not protection.spared(7, JOBS, 105.0)
    assert protection.spared(8, JOBS, 105.1)
