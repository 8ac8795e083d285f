"""Keep the sessions of one agent: its own, and one for each role that it gives to the model.

A role's key is the agent's key, ":" and a name: "solver", or "solver/2" if several play it. Each
has its own conversations, `max_tokens` and reward.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from buffer.errors import ConfigError, WireError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.engines.base import EngineDeadError
from producer_workers.gateway.agents import EVERY_ROLE, Earned
from producer_workers.gateway.segment import Segment
from producer_workers.gateway.session import Session
from producer_workers.gateway.session_record import SessionRecord
from producer_workers.judges.judge import reward_turns

MOST_ROLES = 64  # sessions of one agent beside its own

_NAME = re.compile(r"[\w.-]{1,48}(/\d{1,4})?", re.ASCII)


class AgentSessions:
    """The sessions of one agent by name, "" for its own; all are interrupted together.

    `make`: from a name and its finished segments. `finished`: those of an interrupted agent.
    """

    def __init__(
        self,
        make: Callable[[str, list[Segment]], Session],
        finished: Mapping[str, list[Segment]] | None = None,
    ) -> None:
        self._make = make
        self.interrupted = asyncio.Event()
        self.failure: EngineDeadError | None = None  # ended the engine, and the sessions
        self._by_name: dict[str, Session] = {}
        for name, segments in {"": [], **(finished or {})}.items():
            self._add(name, segments)

    def of(self, name: str) -> Session:
        """Return the session of this name, a new one at first. Raises ConfigError."""
        if name not in self._by_name:
            if not _NAME.fullmatch(name):
                hint = "a name is solver, or solver/2"
                raise ConfigError(f"no role can have the name {name!r:.80}", hint=hint)
            if len(self._by_name) > MOST_ROLES:
                raise ConfigError(f"this agent has {MOST_ROLES} sessions for roles, the limit")
            self._add(name, [])
        return self._by_name[name]

    def _add(self, name: str, finished: list[Segment]) -> None:
        session = self._by_name[name] = self._make(name, finished)
        session.interrupted = self.interrupted

    def segments(self) -> dict[str, list[Segment]]:
        """Return those of the sessions with an answer of the model, by name in order."""
        return {n: each.segments for n, each in sorted(self._by_name.items()) if each.segments}

    def cut(self) -> dict[str, str]:
        """Return why the model said no more in some sessions, by their names."""
        return {name: each.truncation for name, each in self._by_name.items() if each.truncation}

    @property
    def new_contexts(self) -> Counter[str]:
        return sum((each.new_contexts for each in self._by_name.values()), Counter[str]())

    @property
    def is_full(self) -> bool:
        return any(each.is_full for each in self._by_name.values())


# The rollouts of an agent or of one of its sessions, one per segment, all tokens in the response;
# without tokens if it was interrupted or failed.
Rollouts = list[RolloutState]


def interrupted_rollouts(
    state: RolloutState, segments: Mapping[str, Sequence[Segment]], record: SessionRecord
) -> Rollouts:
    """Return the rollouts of an agent that goes on later behind these segments."""
    state.status = Status.ABORTED
    state.finish_reason = "abort"
    if not segments:
        return [state]
    record.keep(state.index, segments)
    made = [rollout for name in segments for rollout in _rollouts(state, name, segments[name])]
    for rollout in made:
        rollout.finish_reason = "abort"
    return made


def ended_rollouts(
    state: RolloutState,
    segments: Mapping[str, Sequence[Segment]],
    cut: Collection[str],
    earned: Earned,
) -> list[Rollouts]:
    """Return the rollouts of each session; those in `cut` end at a limit. Raises WireError."""
    _check_names(segments, earned)
    left_out = {name for name, reward in earned.items() if not reward}
    made = []
    for name in segments:
        if left_out.isdisjoint((name, role_of(name))):
            rollouts = _rollouts(state, name, segments[name])
            if name in cut:
                rollouts[-1].finish_reason = "length"
            _earn(rollouts, name, earned)
            made.append(rollouts)
    if not made:
        raise WireError("no reward for any conversation: all are left out")
    return made


def _rollouts(state: RolloutState, name: str, segments: Sequence[Segment]) -> Rollouts:
    session = f"{state.session_id}/{name}" if name else state.session_id
    return [segment.filled(state, session_id=session, role=role_of(name)) for segment in segments]


def _check_names(names: Collection[str], earned: Earned) -> None:
    known = {EVERY_ROLE, *names, *map(role_of, names)}
    if wrong := sorted(name for name, reward in earned.items() if reward and name not in known):
        raise WireError(
            f"rewards of {', '.join(wrong)}, for which the model has said nothing",
            hint='return them by role: {"solver": {"score": 1.0}}; "" is the agent\'s own session',
        )


def _earn(rollouts: Rollouts, name: str, earned: Earned) -> None:
    """Give a session its reward by the agent. Raises WireError."""
    found = (earned.get(each) for each in (name, role_of(name), EVERY_ROLE))
    reward = dict(next(filter(None, found), {}))
    role = reward.pop("role", role_of(name))
    reward_turns(rollouts, reward)
    for rollout in rollouts:
        rollout.reward = reward or None
        rollout.role = role


def role_of(name: str) -> str:
    """Return the role of a session: those of "solver/1" and "solver/2" are compared."""
    return name.partition("/")[0]
