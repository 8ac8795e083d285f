"""What answers a model between its turns: a set of tools, a game, a user that is played by a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from buffer.rollout import RolloutState, ToolCall
from producer_workers.agent_loops.tool_parsers import ToolParser
from producer_workers.agent_loops.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: its number (0 is the first), its text, and all earlier ones'."""

    number: int
    text: str
    earlier: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes after a turn: messages for the model, or nothing (the conversation is over).

    `calls` are noted in the rollout. `reward` ends up in its reward under that name, beside what the judge says.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reward: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Keeps no state of a rollout: after a pause another worker may ask, so everything follows from the arguments."""

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        """To one turn. What it raises fails the rollout."""
        ...


class ToolEnvironment:
    """Runs the calls of a turn at the same time; a turn without one is the last."""

    def __init__(self, toolbox: Toolbox, parse: ToolParser) -> None:
        self._toolbox, self._parse = toolbox, parse

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        found = enumerate(self._parse(turn.text))
        calls = [call.model_copy(update={"id": f"call_{turn.number}_{place}"}) for place, call in found]
        results = await self._toolbox.call_all(calls)
        messages = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return Answer(messages, calls)
