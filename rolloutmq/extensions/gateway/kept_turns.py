"""Keep the turns of a group's agents as rollouts of what is new, and put them together again.

    Session ──▶ TurnWriter ──▶ RolloutState ──▶ Keeper ──▶ payload of the group
                                       with_turns ◀── the next claim ──┘

An agent gets a turn once the keeper has stored it. The rollout of a turn has the new tokens and, in
`extra`, a `KeptTurn`. If it continues a segment, that segment's last token is its prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, Protocol

import msgspec

from buffer.errors import WireError
from buffer.wire.rollout import RolloutState, Status
from rolloutmq.extensions.gateway.agent_rollouts import (
    Rollouts,
    ended_rollouts,
    interrupted_rollouts,
)
from rolloutmq.extensions.gateway.segment import Segment, TurnEnd, share_prompt
from rolloutmq.extensions.gateway.session_record import SessionRecord

TURN = "turn"  # the key of `extra`


class KeptTurn(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An event of an agent; `begins`: it discards all earlier ones.

    sampled: its segment number `continues` grew by `messages` (None: one of `session` began).
    `why` is that of `Session`; `after`, `name` and `instructed` are those of `TurnEnd`. ended: it
    `earned` rewards, and sessions were `cut`. failed: it begins again. opened: the group's live
    sessions have an `opening`.
    """

    kind: Literal["sampled", "ended", "failed", "opened"]
    begins: bool = False
    session: str = ""
    continues: int | None = None
    messages: list[dict[str, Any]] = []
    tools: Any = None
    after: int = 0
    name: str = ""
    instructed: int = 0
    why: str = ""
    earned: dict[str, dict[str, Any]] = {}
    cut: list[str] = []
    opening: dict[str, Any] | None = None


class Keeper(Protocol):
    """Stores the turns of one claim of a group."""

    def keep(self, turn: RolloutState) -> None:
        """Store a turn behind those before; `stored` tells when."""

    async def stored(self) -> None:
        """Wait until all turns so far are stored. Raises Fenced if the group has another owner."""


def numbered(segments: Mapping[str, Sequence[Segment]]) -> list[tuple[str, Segment]]:
    """Return the segments of an agent, with the names of their sessions, by their numbers."""
    return [(name, segment) for name in sorted(segments) for segment in segments[name]]


class TurnWriter:
    """Writes the turns of one agent, which began with the segments `resumed`, by session."""

    def __init__(
        self, keeper: Keeper, index: int, resumed: Mapping[str, Sequence[Segment]]
    ) -> None:
        self.stored = keeper.stored
        self._keeper = keeper
        self._index = index
        self._numbers = {segment: n for n, (_, segment) in enumerate(numbered(resumed))}
        self._count = len(self._numbers)
        self._begins = not resumed
        self._is_over = False

    def sampled(self, session: str, parent: Segment | None, grown: Segment, why: str) -> None:
        """Write that `grown` took the place of `parent`, or began; its turn is the last."""
        number = self._numbers.pop(parent) if parent else None
        self._numbers[grown] = self._count if number is None else number
        self._count += number is None
        state = RolloutState(index=self._index, status=Status.ABORTED)
        new = grown.behind(parent) if parent else grown
        new.fill(state, int(parent is not None))
        turn = KeptTurn(
            "sampled",
            session=session,
            continues=number,
            messages=list(new.messages),
            tools=None if parent else grown.tools,
            after=grown.ends[-1].after,
            name=grown.ends[-1].name,
            instructed=grown.ends[-1].instructed,
            why=why,
        )
        self._write(state, turn)

    def ended(self, cut: Collection[str], earned: Mapping[str, dict[str, Any]]) -> None:
        self._write(
            RolloutState(index=self._index), KeptTurn("ended", cut=[*cut], earned={**earned})
        )

    def failed(self) -> None:
        self._write(RolloutState(index=self._index), KeptTurn("failed"))

    def _write(self, state: RolloutState, turn: KeptTurn) -> None:
        if self._is_over:  # a request that was being answered when its agent ended
            return
        self._is_over = turn.kind != "sampled"
        turn.begins, self._begins = self._begins, False
        _write(self._keeper, state, turn)


def write_opening(keeper: Keeper, index: int, opening: dict[str, Any]) -> None:
    """Write that the group's live sessions are open; `index`: of any rollout."""
    _write(keeper, RolloutState(index=index), KeptTurn("opened", opening=opening))


def _write(keeper: Keeper, state: RolloutState, turn: KeptTurn) -> None:
    state.extra = {TURN: msgspec.to_builtins(turn)}
    keeper.keep(state)


class _Agent:
    """The segments of one agent by number, while its turns are read."""

    def __init__(self, segments: Mapping[str, Sequence[Segment]], *, trains_all: bool) -> None:
        self._segments = numbered(segments)
        self._trains_all = trains_all
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
        cut, earned = self._end.cut, self._end.earned
        made = ended_rollouts(state, by_session, cut, earned, record, trains_all=self._trains_all)
        return [*chain.from_iterable(made)]


def _grown(known: Segment | None, turn: KeptTurn, state: RolloutState) -> Segment:
    """Return `known` with the turn in `state` behind it, for rollouts: its `said` is not complete.

    A session that continues compares the messages anew.
    """
    if known:
        state.prompt_ids = known.ids[:0]  # else its one token would be there twice
    new = Segment.of_state(state, turn.messages, turn.tools)
    told = (turn.after, turn.name, turn.instructed, int(new.mask.sum()), new.finish_reason)
    new = replace(new, ends=(TurnEnd(len(turn.messages), len(new.ids), *told),))
    return known.then(new) if known else new


def with_turns(
    states: Sequence[RolloutState],
    turns: Sequence[RolloutState],
    gid: str,
    *,
    trains_all: bool = False,
) -> Rollouts:
    """Return the rollouts of a group whose worker died after `turns`. Raises WireError.

    `trains_all`: see `ended_rollouts`.
    """
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
                resumed = record.resume(rollouts[index], f"{gid}/{index}")
                agents[index] = _Agent(resumed, trains_all=trains_all)
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
