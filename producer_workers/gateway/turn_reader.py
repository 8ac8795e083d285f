"""Put the sessions of a group together from its turns, as a pause would have left them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import msgspec
import numpy as np

from buffer.errors import WireError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.gateway.agent_rollouts import (
    Rollouts,
    ended_rollouts,
    interrupted_rollouts,
)
from producer_workers.gateway.segment import Segment, SessionRecord, share_prompt
from producer_workers.gateway.turn_writer import TURN, KeptTurn, numbered


class _Agent:
    """The segments of one agent by number, while its turns are read."""

    def __init__(self, segments: Mapping[str, Sequence[Segment]]) -> None:
        self._segments = numbered(segments)
        self._end: KeptTurn | None = None

    def read(self, turn: KeptTurn, state: RolloutState) -> None:
        if turn.begins or turn.kind == "failed":
            self._segments, self._end = [], None
        if turn.kind == "ended":
            self._end = turn
        elif turn.kind == "sampled":
            number = turn.continues
            if number is None:
                self._segments.append((turn.session, _grown(None, turn, state)))
            else:
                name, known = self._segments[number]
                self._segments[number] = (name, _grown(known, turn, state))

    def rollouts(self, state: RolloutState, record: SessionRecord) -> Rollouts:
        state.reset_response()
        by_session: dict[str, list[Segment]] = {}
        for name, segment in sorted(self._segments, key=lambda one: (one[0], one[1].order())):
            by_session.setdefault(name, []).append(segment)
        if not self._end:
            return interrupted_rollouts(state, by_session, record)
        state.status = Status.ABORTED
        made = ended_rollouts(state, by_session, self._end.cut, self._end.earned)
        return [*chain.from_iterable(made)]


def _grown(known: Segment | None, turn: KeptTurn, state: RolloutState) -> Segment:
    """Return `known` with the turn in `state` behind it."""
    if known:
        state.prompt_ids = known.ids[:0]  # else its one token would be there twice
    reason = state.finish_reason or ""
    new = Segment.resumed(state, turn.messages, turn.tools, reason, after=turn.after)
    if known is None:
        return new
    experts = None
    if isinstance(known.experts, np.ndarray) and isinstance(new.experts, np.ndarray):
        experts = np.concatenate([known.experts, new.experts])
    return replace(known.then(new), experts=experts)


def with_turns(states: Sequence[RolloutState], turns: Sequence[RolloutState], gid: str) -> Rollouts:
    """Return the rollouts of a group whose worker died after `turns`. Raises WireError."""
    record = SessionRecord(states[0].extra)
    rollouts: dict[int, Rollouts] = {}
    for state in states:
        rollouts.setdefault(state.index, []).append(state)
    agents: dict[int, _Agent] = {}
    for state in turns:
        index = state.index
        try:
            turn = msgspec.convert(state.extra[TURN], KeptTurn)
            record.opening = turn.opening or record.opening
            if turn.kind == "opened":
                continue
            if index not in agents:
                agents[index] = _Agent(record.resume(rollouts[index], f"{gid}/{index}"))
            agents[index].read(turn, state)
        except (KeyError, IndexError, msgspec.ValidationError) as error:
            raise WireError(f"a turn of rollout {index} cannot be read: {error}") from error
        record.count({turn.why: 1} if turn.why else {})
    group: Rollouts = []
    for index, found in rollouts.items():
        if index in agents:
            first = found[0].model_copy(update={"session_id": f"{gid}/{index}"})
            group += agents[index].rollouts(first, record)
        else:
            record.leave(index)
            group += found
    share_prompt(group)
    record.write(group)
    return group
