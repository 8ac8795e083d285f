"""Which members of a claimed group start again."""

from __future__ import annotations

from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.staleness import AgeLimit
from producer_workers.worker.task_runner import restart_too_old


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


def test_a_session_with_a_segment_that_is_too_old_starts_again_as_one_member() -> None:
    states = [segment(0, 5), segment(0, 2), segment(1, 5), segment(1, 4)]
    left = restart_too_old(states, AgeLimit(3, "", []))
    assert [(state.index, len(state.response_ids)) for state in left] == [(0, 0), (1, 1), (1, 1)]
    assert (left[0].status, left[0].session_id) == (Status.INIT, "s0")


def test_a_member_that_was_put_as_expired_starts_again() -> None:
    states = [segment(0, 5, Status.EXPIRED), segment(1, 5)]
    left = restart_too_old(states, AgeLimit(3, "", []))
    assert [state.status for state in left] == [Status.INIT, Status.COMPLETED]


def test_a_member_of_weights_that_were_rolled_back_counts_as_the_fork() -> None:
    states = [segment(0, 9), segment(1, 4)]
    left = restart_too_old(states, AgeLimit(4, "", [("l1", 0), ("l2", 3)]))
    assert [len(state.response_ids) for state in left] == [0, 0]
    left = restart_too_old([segment(0, 9)], AgeLimit(3, "", [("l1", 0), ("l2", 3)]))
    assert len(left[0].response_ids) == 1
