"""Keep the interrupted sessions of a group, and the counts of its contexts, in its `extra`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgpack

from buffer.errors import WireError
from buffer.wire.checks import check_plain
from buffer.wire.group import (
    AGENT_RECORD,
    LIVE_OPENING,
    NEW_CONTEXTS,
    OPEN_SESSIONS,
    SESSIONS_RESTARTED,
    new_contexts,
)
from buffer.wire.rollout import RolloutState
from rolloutmq.extensions.gateway.history import Messages
from rolloutmq.extensions.gateway.segment import Segment, TurnEnd


class SessionRecord:
    """The interrupted sessions of a claimed group, kept in its `extra` for the next worker.

        extra["open_sessions"] = {"<index>": [[messages, tools, finish_reason, turns], ...]}
        extra["sessions_restarted"] = 2
        extra["new_contexts"] = {"turn": 3}
        extra["live_opening"] = {"nonce": "…", "at_s": 1760000000.0}   of live/

    Open sessions, which their agent can resume, have one entry per rollout, in order; their tokens
    are in the rollouts; each of `turns` is a `TurnEnd`. Sessions that cannot be resumed, or whose
    tokens are too old, begin again and are counted, and so are contexts that began within a
    session, by the words of `why_new`, or because the chat template rewrites earlier turns
    ("template"), or because another request had continued the same turn ("branch").
    """

    def __init__(self, extra: dict[str, Any]) -> None:
        self._found: dict[str, list[Any]] = dict(extra.get(OPEN_SESSIONS, {}))
        self._open: dict[str, list[Any]] = {}
        self._restarted = int(extra.get(SESSIONS_RESTARTED, 0))
        self._new_contexts = Counter(new_contexts(extra))
        self.opening: dict[str, Any] | None = extra.get(LIVE_OPENING)

    def resume(self, rollouts: Sequence[RolloutState], agent: str) -> dict[str, list[Segment]]:
        """Return the segments of an agent's open sessions by name; empty if it begins (again).

        `agent`: the id of its own session, with which those of the others begin.
        """
        known = self._found.get(str(rollouts[0].index), [])
        sampled = [rollout for rollout in rollouts if len(rollout.response_ids)]
        if not known or len(sampled) != len(known):
            self._restarted += bool(known)
            return {}
        found: dict[str, list[Segment]] = {}
        for rollout, (messages, tools, reason, *turns) in zip(sampled, known, strict=True):
            own = found.setdefault((rollout.session_id or "")[len(agent) + 1 :], [])
            ends = [TurnEnd(*turn) for turn in chain(*turns)]  # a record of before has no turns
            segment = Segment.of_state(rollout, messages, tools, ends)
            own.append(replace(segment, finish_reason=reason))
        return found

    def keep(self, index: int, segments: Mapping[str, Sequence[Segment]]) -> None:
        self._open[str(index)] = [
            [one.messages, one.tools, one.finish_reason, list(map(list, one.ends))]
            for each in segments.values()
            for one in each
        ]

    def leave(self, index: int) -> None:
        """Keep what is known of an agent's sessions."""
        if known := self._found.get(str(index)):
            self._open[str(index)] = known

    def restart(self) -> None:
        self._restarted += 1

    def count(self, contexts: Mapping[str, int]) -> None:
        self._new_contexts.update(contexts)

    def write(self, states: Sequence[RolloutState]) -> None:
        counts = {
            SESSIONS_RESTARTED: self._restarted,
            OPEN_SESSIONS: self._open,
            NEW_CONTEXTS: dict(self._new_contexts),
            LIVE_OPENING: self.opening,
        }
        record = {name: value for name, value in counts.items() if value}
        for state in states:
            state.extra = without_record(state.extra) | record


def check_storable(messages: Messages, tools: Any) -> None:
    """Raise WireError if the record of an interrupted session could not be stored with these."""
    check_plain("messages and tools", [{OPEN_SESSIONS: {"0": [[list(messages), tools]]}}])
    try:
        msgpack.packb([*messages, tools])
    except OverflowError as error:
        raise WireError(f"messages and tools: {error}") from error


def without_record(extra: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in AGENT_RECORD}
