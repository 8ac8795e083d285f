from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.staleness import AgeLimit
from producer_workers.worker.loop_border import LoopError, LoopInput
from producer_workers.worker.task_runner import restart_too_old

Act = Callable[[RolloutState], object]


def state(status: Status) -> RolloutState:
    return RolloutState(
        index=3,
        prompt_ids=[1, 2],
        response_ids=[5, 6, 7],
        logprobs=[-1, -2, -3],
        spans=[VersionSpan(0, 2, 4, "l0"), VersionSpan(2, 1, 5, "l0")],
        status=status,
        finish_reason="stop" if status is Status.COMPLETED else "abort",
        reward={"score": 1.0},
    )


def add(state: RolloutState) -> None:
    state.append(np.array([8], "<i4"), np.array([-4], "<f4"), [VersionSpan(0, 1, 6, "l0")])


def start_again(state: RolloutState) -> None:
    state.reset_response()
    for _ in range(4):
        add(state)
    state.reward = {"score": 0.0}


def change(name: str, at: int) -> Act:
    def changed(state: RolloutState) -> None:
        column = getattr(state, name).copy()
        column[at] = 9
        setattr(state, name, column)

    return changed


def then_add(act: Act) -> Act:
    def both(state: RolloutState) -> None:
        act(state)
        add(state)

    return both


KEPT: list[Act] = [lambda _: None, add, start_again]
CHANGES = [change(name, at) for name in ("response_ids", "logprobs") for at in (0, 2)]


def loop_result(rollout: RolloutState, act: Act) -> RolloutState:
    """Return what the worker gets of a loop that does `act` to its rollout, and completes it."""
    source = LoopInput([rollout], [])
    (lent,) = source.lend([rollout])
    act(lent)
    lent.status = Status.COMPLETED
    (made,) = source.accept([rollout], [lent])
    return made


@pytest.mark.parametrize(
    ("act", "is_right"),
    [*((act, True) for act in KEPT), *((then_add(act), False) for act in CHANGES)],
)
def test_tokens_that_an_interrupted_rollout_had_are_kept(act: Act, is_right: bool) -> None:
    with nullcontext() if is_right else pytest.raises(LoopError, match="rollout 3"):
        loop_result(state(Status.ABORTED), act)


@pytest.mark.parametrize("act", [*KEPT, *CHANGES])
def test_a_completed_rollout_stays_as_it_was(act: Act) -> None:
    made = loop_result(state(Status.COMPLETED), act)
    before = state(Status.COMPLETED)
    assert made.response_ids.tolist() == before.response_ids.tolist()
    assert made.logprobs.tolist() == before.logprobs.tolist()
    assert (made.spans, made.reward) == (before.spans, before.reward)


# -- restarts ------------------------------


def segment(index: int, version: int, status: Status = Status.COMPLETED) -> RolloutState:
    return RolloutState(
        index=index,
        session_id=f"s{index}",
        response_ids=[5],
        logprobs=[-0.5],
        spans=[VersionSpan(0, 1, version, "l1")],
        status=status,
        finish_reason="stop",
    )


def copy(states: Sequence[RolloutState]) -> list[RolloutState]:
    return [state.model_copy() for state in states]


def ignore(_: Sequence[RolloutState]) -> None:
    pass


def test_a_session_with_a_segment_that_is_too_old_starts_again_as_one_member() -> None:
    states = [segment(0, 5), segment(0, 2), segment(1, 5), segment(1, 4)]
    lost: list[RolloutState] = []
    left = restart_too_old(states, AgeLimit(3, None, []), lambda each: lost.extend(copy(each)))
    assert [len(state.response_ids) for state in lost] == [1, 1]
    assert [(state.index, len(state.response_ids)) for state in left] == [(0, 0), (1, 1), (1, 1)]
    assert (left[0].status, left[0].session_id) == (Status.INIT, "s0")


def test_a_member_that_was_put_as_expired_starts_again() -> None:
    states = [segment(0, 5, Status.EXPIRED), segment(1, 5)]
    left = restart_too_old(states, AgeLimit(3, None, []), ignore)
    assert [state.status for state in left] == [Status.INIT, Status.COMPLETED]


def test_a_member_of_weights_that_were_rolled_back_counts_as_the_fork() -> None:
    states = [segment(0, 9), segment(1, 4)]
    left = restart_too_old(states, AgeLimit(4, None, [("l1", 0), ("l2", 3)]), ignore)
    assert [len(state.response_ids) for state in left] == [0, 0]
    left = restart_too_old([segment(0, 9)], AgeLimit(3, None, [("l1", 0), ("l2", 3)]), ignore)
    assert len(left[0].response_ids) == 1
