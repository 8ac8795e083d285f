"""Chooses which members of a group start again, and which keep what they have.

A member that has ended keeps its tokens and its reward; one that only lacks its reward is judged
again. Only the others are generated again, and the group is as old as its oldest member that has
tokens (I8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from buffer.rollouts.rollout import RolloutState, Status, has_ended
from buffer.rollouts.staleness import AgeLimit


def restart_too_old(states: Sequence[RolloutState], limit: AgeLimit) -> list[RolloutState]:
    """Return the members of a claimed group, those that are too old without their response.

    A session with a segment that is too old starts again as a whole, as one member.
    """
    return restart(
        states,
        {s.index for s in states if s.status is Status.EXPIRED or limit.is_too_old(s)},
    )


def restart(states: Sequence[RolloutState], indexes: Collection[int]) -> list[RolloutState]:
    """Return the members, those of `indexes` without their response: one for each of them."""
    firsts = {state.index: state for state in reversed(states)}
    for index in indexes:
        firsts[index].reset_response()
    return [state for state in states if state.index not in indexes or firsts[state.index] is state]


def restart_unfinished(states: Iterable[RolloutState]) -> None:
    """Discard the response of each interrupted member of a task without partial rollout."""
    for state in filter(is_interrupted, states):
        state.reset_response()
        interrupt(state)


def is_interrupted(state: RolloutState) -> bool:
    """Return whether a pause ended a rollout before its response was complete."""
    return state.status is Status.ABORTED and not has_ended(state)


def interrupt(state: RolloutState) -> None:
    """Mark a rollout as one that a pause ended."""
    state.status = Status.ABORTED
    state.finish_reason = "abort"
