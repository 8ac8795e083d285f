"""Record the interrupted sessions of a group in its `extra`, so that agents can continue elsewhere.

    extra["open_sessions"] = {"<index>": [[messages, tools, finish_reason], ...]}
    extra["sessions_restarted"] = 2

An open session has an entry for each of its rollouts, in order; their tokens are in the rollouts.
It is continued where its agent is resumable. Any other session that was interrupted, or whose
rollouts were restarted because their tokens are too old, begins again, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from buffer.rollouts.group import OPEN_SESSIONS, SESSIONS_RESTARTED
from buffer.rollouts.rollout import RolloutState
from producer_workers.gateway.segment import Segment


class SessionRecord:
    """The record of one group, as it was claimed."""

    def __init__(self, extra: dict[str, Any]) -> None:
        self._found: dict[str, list[Any]] = dict(extra.get(OPEN_SESSIONS, {}))
        self._open: dict[str, list[Any]] = {}
        self._restarted = int(extra.get(SESSIONS_RESTARTED, 0))

    def resume(self, rollouts: Sequence[RolloutState]) -> list[Segment]:
        """Return the segments of an open session; none where it begins (again)."""
        known = self._found.get(str(rollouts[0].index), [])
        sampled = [rollout for rollout in rollouts if len(rollout.response_ids)]
        if not known or len(sampled) != len(known):
            self._restarted += bool(known)
            return []
        return [
            replace(Segment.of_state(rollout), messages=messages, tools=tools, finish_reason=reason)
            for rollout, (messages, tools, reason) in zip(sampled, known, strict=True)
        ]

    def keep(self, index: int, segments: Sequence[Segment]) -> None:
        """Record an interrupted session that may be continued."""
        self._open[str(index)] = [[s.messages, s.tools, s.finish_reason] for s in segments]

    def restart(self) -> None:
        """Count an interrupted session that begins again."""
        self._restarted += 1

    def write(self, states: Sequence[RolloutState]) -> None:
        """Write the record into the `extra` of a group."""
        counts = {SESSIONS_RESTARTED: self._restarted, OPEN_SESSIONS: self._open}
        record = {name: value for name, value in counts.items() if value}
        for state in states:
            state.extra = without_record(state.extra) | record


def without_record(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the `extra` of a rollout as its agent gets it."""
    own = (OPEN_SESSIONS, SESSIONS_RESTARTED)
    return {name: value for name, value in extra.items() if name not in own}
