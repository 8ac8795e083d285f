"""What an agent loop may do with tokens that a rollout had: keep them, add to them, or discard all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from buffer.wire.rollout import RolloutState, Status, VersionSpan
from producer_workers.worker.loop_border import LoopError, LoopInput

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
