"""Record the turns of a group's sessions one by one, and put the sessions together from them.

    Session ──▶ TurnWriter ──▶ RolloutState of what is new ──▶ Keeper ──▶ payload of the group
                                                       the next claim ──▶ with_turns

The agent gets a turn once the keeper has stored it. A turn is a rollout with the new tokens and, in
`extra`, a `Turn`. One that continues a segment has that segment's last token as its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from buffer.errors import WireError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.gateway.history import Conversation
from producer_workers.gateway.segment import Segment, SessionRecord, TurnEnd, share_prompt

TURN = "turn"  # the key of `extra`


class Turn(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What happened in a session. `resumed`: the segments that it began with, in its first turn.

    sampled: the segment `continues` grew (None: one began) by `messages`. `why` and `after` are
    those of `Session`. ended: with the agent's own `reward`. failed: it begins again.
    """

    kind: str = "sampled"
    resumed: int | None = None
    continues: int | None = None
    messages: list[dict[str, Any]] = []
    tools: Any = None
    after: int = 0
    why: str = ""
    reward: dict[str, float] | None = None


class Keeper(Protocol):
    """Stores the turns of one claim of a group."""

    def keep(self, turn: RolloutState) -> None:
        """Store a turn behind those before; `stored` tells when."""

    async def stored(self) -> None:
        """Wait until all turns so far are stored. Raises Fenced if the group has another owner."""


class TurnWriter:
    """Writes the turns of one session, which began with the segments `resumed`."""

    def __init__(self, keeper: Keeper, index: int, resumed: Sequence[Segment]) -> None:
        self.stored = keeper.stored
        self._keep = keeper.keep
        self._index = index
        self._numbers = {segment: n for n, segment in enumerate(resumed)}
        self._count = len(resumed)
        self._resumed: int | None = self._count

    def sampled(self, parent: Segment | None, grown: Segment, why: str) -> None:
        """Write that `grown` took the place of `parent`, or began; its turn is the last."""
        number = self._numbers.pop(parent) if parent else None
        self._numbers[grown] = self._count if number is None else number
        self._count += number is None
        state = RolloutState(index=self._index, status=Status.ABORTED)
        _behind(parent, grown).fill(state, int(parent is not None))
        known = len(parent.messages) if parent else 0
        self._write(
            state,
            Turn(
                continues=number,
                messages=list(grown.messages[known:]),
                tools=None if parent else grown.tools,
                after=grown.after,
                why=why,
            ),
        )

    def ended(self, finish_reason: str, reward: Mapping[str, float] | None) -> None:
        state = RolloutState(index=self._index, finish_reason=finish_reason)
        self._write(state, Turn("ended", reward=dict(reward) if reward else None))

    def failed(self) -> None:
        self._write(RolloutState(index=self._index), Turn("failed"))

    def _write(self, state: RolloutState, turn: Turn) -> None:
        turn.resumed, self._resumed = self._resumed, None
        state.extra = {TURN: msgspec.to_builtins(turn)}
        self._keep(state)


class _Session:
    """The segments of one session in the order of their numbers, while its turns are read."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments
        self.end: tuple[str, dict[str, float] | None] | None = None

    def read(self, turn: Turn, state: RolloutState) -> None:
        if turn.resumed == 0:
            self.segments = []
        if turn.kind == "failed":
            self.segments = []
        elif turn.kind == "ended":
            self.end = (state.finish_reason or "", turn.reward)
        elif turn.continues is None:
            self.segments.append(_grown(None, turn, state))
        else:
            known = self.segments[turn.continues]
            self.segments[turn.continues] = _grown(known, turn, state)

    def states(self, first: RolloutState, record: SessionRecord) -> list[RolloutState]:
        """Return the rollouts of the session as a pause would have left them."""
        state = first.model_copy()
        state.reset_response()
        state.status = Status.ABORTED
        state.finish_reason = "abort"
        segments = sorted(self.segments, key=Segment.order)
        if not segments:
            return [state]
        if self.end is None:
            record.keep(state.index, segments)
            return [replace(each, finish_reason="abort").filled(state) for each in segments]
        reason, reward = self.end
        segments[-1] = replace(segments[-1], finish_reason=reason)
        return [segment.filled(state, reward=reward) for segment in segments]


def _behind(parent: Segment | None, grown: Segment) -> Segment:
    """Return `grown` from the last token of `parent` on."""
    if parent is None:
        return grown
    first = len(parent.ids) - 1
    experts = grown.experts
    return replace(
        grown,
        ids=grown.ids[first:],
        mask=grown.mask[first:],
        logprobs=grown.logprobs[first:],
        spans=tuple(
            span._replace(start=span.start - first) for span in grown.spans[len(parent.spans) :]
        ),
        calls=grown.calls[len(parent.calls) :],
        experts=experts[first:] if isinstance(experts, np.ndarray) else experts,
    )


def _grown(known: Segment | None, turn: Turn, state: RolloutState) -> Segment:
    """Return `known` with the turn in `state` behind it."""
    new = Segment.of_state(state)
    messages = [*(known.messages if known else ()), *turn.messages]
    made = replace(
        new,
        messages=messages,
        said=Conversation.of(messages),
        tools=known.tools if known else turn.tools,
        after=turn.after,
    )
    if known:
        start = len(known.ids) - 1
        both = isinstance(known.experts, np.ndarray) and isinstance(new.experts, np.ndarray)
        made = replace(
            made,
            ids=np.concatenate([known.ids, new.ids[1:]]),
            mask=np.concatenate([known.mask, new.mask[1:]]),
            logprobs=np.concatenate([known.logprobs, new.logprobs[1:]]),
            spans=(*known.spans, *(s._replace(start=s.start + start) for s in new.spans)),
            calls=(*known.calls, *new.calls),
            experts=np.concatenate([known.experts, new.experts]) if both else None,
        )
    ends = known.ends if known else ()
    return replace(made, ends=(*ends, TurnEnd(len(messages), len(made.ids))))


def with_turns(states: Sequence[RolloutState], turns: Sequence[RolloutState]) -> list[RolloutState]:
    """Return the rollouts of a group whose worker died after `turns`. Raises WireError."""
    record = SessionRecord(states[0].extra)
    rollouts: dict[int, list[RolloutState]] = {}
    for state in states:
        rollouts.setdefault(state.index, []).append(state)
    sessions = {index: _Session(record.resume(found)) for index, found in rollouts.items()}
    begun = set[int]()
    for state in turns:
        try:
            turn = msgspec.convert(state.extra[TURN], Turn)
            sessions[state.index].read(turn, state)
        except (KeyError, IndexError, msgspec.ValidationError) as error:
            raise WireError(f"a turn of rollout {state.index} is damaged: {error}") from error
        begun.add(state.index)
        record.count({turn.why: 1} if turn.why else {})
    group: list[RolloutState] = []
    for index, found in rollouts.items():
        if index in begun:
            group += sessions[index].states(found[0], record)
            continue
        if sessions[index].segments:
            record.keep(index, sessions[index].segments)
        group += found
    share_prompt(group)
    record.write(group)
    return group
