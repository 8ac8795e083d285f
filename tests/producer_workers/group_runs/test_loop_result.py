"""What an agent loop may do with tokens that a rollout had: keep them, add to them, or discard all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from buffer.rollouts.rollout import RolloutState, Status, VersionSpan
from producer_workers.group_runs.loop_result import Given, LoopError, check_result

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

CASES: list[tuple[Status, Act, bool]] = [
    *[(Status.ABORTED, act, True) for act in KEPT],
    *[(Status.ABORTED, then_add(act), False) for act in CHANGES],
    (Status.COMPLETED, KEPT[0], True),
    *[(Status.COMPLETED, act, False) for act in [add, start_again, *CHANGES]],
]


@pytest.mark.parametrize(("status", "act", "is_right"), CASES)
def test_tokens_that_a_rollout_had_are_kept(status: Status, act: Act, is_right: bool) -> None:
    rollout = state(status)
    given = Given.of([rollout])
    act(rollout)
    rollout.status = Status.COMPLETED
    with nullcontext() if is_right else pytest.raises(LoopError, match="rollout 3"):
        check_result(given, [rollout])
