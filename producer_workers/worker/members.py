"""Figures of rollouts that a user's agent loop works on, for heartbeats and claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from buffer.rollouts.rollout import PolicyVersion, RolloutState, Status, has_ended

T = TypeVar("T")

UNJUDGED = (Status.INIT, Status.ABORTED)
"""Statuses of a sampled rollout whose judge has not answered yet."""


def figure(
    compute: Callable[[Sequence[RolloutState]], T], members: Sequence[RolloutState], fallback: T
) -> T:
    """Return `compute(members)`, or `fallback` where a user's loop has put rubbish into them.

    The group fails for that rubbish when the loop returns (`check_result`).
    """
    try:
        return compute(members)
    except Exception:  # any field of a member may be anything
        return fallback


def open_share(members: Sequence[RolloutState]) -> float:
    """Return the share of the members that may still need the engine."""
    if not members:
        return 1.0
    return sum(not has_ended(member) for member in members) / len(members)


def waits_for_judge(members: Sequence[RolloutState]) -> bool:
    """Return whether all members are sampled, and some are without their judge's answer."""
    return not open_share(members) and any(member.status in UNJUDGED for member in members)


def oldest_weights(
    states: Iterable[RolloutState], began: PolicyVersion | None
) -> PolicyVersion | None:
    """Return the oldest weights in the tokens of a group; None if it has none.

    The first tokens of a rollout are its oldest: weights of a lineage that was abandoned come
    before those of the fork.
    """
    first = [span for state in states for span in state.spans[:1]]
    weights = [PolicyVersion(span.lineage, span.version) for span in first]
    return min([*weights, *([began] if began else [])], key=lambda w: w.version, default=None)
