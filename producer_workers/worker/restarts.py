"""Chooses which members of a group start again, and which keep what they have.

A member that has ended keeps its tokens and its reward; one that only lacks its reward is judged
again. Only the others are generated again, and the group is as old as its oldest member that has
tokens (I8).
"""

from __future__ import annotations

from collections.abc import Iterable

from buffer.model.rollout import RolloutState, Status, has_ended


def restart_unfinished(states: Iterable[RolloutState]) -> None:
    """Discard the response of each interrupted member of a task without partial rollout."""
    for state in states:
        if state.status is Status.ABORTED and not has_ended(state):
            state.reset_response()
            state.status = Status.ABORTED
            state.finish_reason = "abort"
