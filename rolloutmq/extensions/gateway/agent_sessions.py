"""Keep the sessions of one agent: its own, and one for each role that it gives to the model.

A role's key is the agent's key, ":" and a name: "solver", or "solver/2" if several play it. Each
has its own conversations, `max_tokens` and reward.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping

from buffer.errors import ConfigError
from producer_workers.engines.base import EngineDeadError
from rolloutmq.extensions.gateway.segment import Segment
from rolloutmq.extensions.gateway.session import Session

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
        self.restart(finished or {})

    def restart(self, finished: Mapping[str, list[Segment]]) -> None:
        self._by_name.clear()
        for name, segments in {"": [], **finished}.items():
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
