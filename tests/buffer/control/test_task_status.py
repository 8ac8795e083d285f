"""How a batch stands follows from control state, step and limits alone, in the reference's order of
precedence.
"""

from __future__ import annotations

import pytest

from buffer.control.control import ControlState, Mode
from buffer.control.task_status import ProduceBatchStatus, batch_status
from buffer.limits import RunLimits, TaskLimits
from buffer.wire.rollout import PolicyVersion

STATUS = ProduceBatchStatus
ALL = ("eval", "resume", "fresh")
TASKS = {"math": TaskLimits(), "quiz": TaskLimits(eval_of="math")}


def state(mode: Mode = Mode.RUN, lanes: tuple[str, ...] = ALL, version: int = 4) -> ControlState:
    return ControlState(1, mode, lanes, PolicyVersion("l", version), "", "")


def test_weights_of_step_4_serve_steps_5_to_8_and_are_expired_at_9() -> None:
    limits = RunLimits(stale_threshold=4, sync_weights_interval=4, tasks=TASKS)
    assert [batch_status(state(), step, limits) for step in (5, 8, 9)] == [STATUS.NORMAL] * 2 + [
        STATUS.EXPIRED_BATCH
    ]


def test_tokens_that_expire_earlier_expire_the_batch_earlier() -> None:
    limits = RunLimits(stale_threshold=4, token_threshold=2, tasks=TASKS)
    assert batch_status(state(), 6, limits) is STATUS.NORMAL
    assert batch_status(state(), 7, limits) is STATUS.EXPIRED_BATCH


def test_the_strictest_task_of_a_batch_decides_when_its_weights_are_too_old() -> None:
    strict = TaskLimits(stale_threshold=1)
    limits = RunLimits(stale_threshold=4, tasks={**TASKS, "code": strict})
    assert [batch_status(state(), step, limits) for step in (5, 6)] == [
        STATUS.NORMAL,
        STATUS.EXPIRED_BATCH,
    ]
    strict.weight = 0.0
    assert batch_status(state(), 6, limits) is STATUS.NORMAL


@pytest.mark.parametrize("mode", [Mode.ABORT, Mode.DRAIN, Mode.KEEP])
def test_pause_comes_before_expiry_and_the_end_before_a_pause(mode: Mode) -> None:
    limits = RunLimits(stale_threshold=1)
    for lanes in ((), ("eval",)):
        assert batch_status(state(mode, lanes), 99, limits) is STATUS.UPDATE_WEIGHT_AND_ABORT
    assert batch_status(state(Mode.FINISH, ()), 99, limits) is STATUS.FINISH
