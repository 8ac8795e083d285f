"""Compare the conversations that agents send, in the parts that a client must leave unchanged.

A client may drop the thoughts of the model's turns, write the arguments of its calls anew, and
rename the calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from producer_workers.agent_loops.call_json import read_json
from producer_workers.agent_loops.tokenizer import SYSTEM_ROLES
from producer_workers.agent_loops.tool_parsers import end_of_thought

Messages = Sequence[dict[str, Any]]

_THOUGHT = ("reasoning_content", "reasoning")  # fields in which clients keep a thought apart
_BEGINS = ("<think>", "[THINK]")


def split_thought(text: str) -> tuple[str | None, str]:
    """Return the thought of a turn (None: it has none) and the rest."""
    end = end_of_thought(text)
    if not end and text.lstrip().startswith(_BEGINS):
        end = len(text)  # cut off before the thought ended
    if not end:
        return None, text
    thought = text[:end].strip()
    for mark in _BEGINS:
        thought = thought.removeprefix(mark)
    for mark in ("</think>", "[/THINK]"):
        thought = thought.removesuffix(mark)
    return thought.strip(), text[end:].lstrip()


def said_in(message: dict[str, Any]) -> tuple[Any, str | None, list[Any]]:
    """Return a message, the thought that was taken out of it, and the ids of its calls."""
    ids = [call["id"] for call in message.get("tool_calls", ())]
    if message["role"] != "assistant":
        return message, None, ids
    thought, text = split_thought(message["content"])
    kept_apart = next((message[key] for key in _THOUGHT if key in message), None)
    if kept_apart is not None:
        thought = kept_apart.strip()
    calls = [
        (call["function"]["name"], _value(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    own = ("content", "tool_calls", *_THOUGHT)
    rest = {key: value for key, value in message.items() if key not in own}
    return (rest, text.strip(), calls), thought, ids


@dataclass(frozen=True, slots=True)
class Conversation:
    """What must be the same in a conversation that continues another; all lists are by message.

    `turns` are the messages without thoughts; calls have numbers in place of ids. A thought of None
    was not sent.
    """

    turns: list[Any]
    thoughts: list[str | None]
    calls: list[list[Any]]  # their ids

    @classmethod
    def of(cls, messages: Messages) -> Conversation:
        return cls.join(list(map(said_in, messages)))

    @classmethod
    def join(cls, said: Sequence[tuple[Any, str | None, list[Any]]]) -> Conversation:
        turns, thoughts, calls = map(list, zip(*said, strict=True)) if said else ([], [], [])
        numbers: dict[Any, int] = {}
        count = itertools.count()
        for place, turn in enumerate(turns if any(calls) else ()):
            if isinstance(turn, tuple):  # the model's
                numbers.update(zip(calls[place], count, strict=False))
            elif "tool_call_id" in turn:
                called = turn["tool_call_id"]
                turns[place] = {**turn, "tool_call_id": numbers.get(called, called)}
        return cls(turns, thoughts, calls)

    def shared(self, other: Conversation) -> int:
        """Return how many first messages both have."""
        both = min(len(self.turns), len(other.turns))
        if self.part(0, both) == other.part(0, both):
            return both
        pairs = zip(self.turns, other.turns, self.thoughts, other.thoughts, strict=False)
        same = (a == b and thought in (None, known or "") for a, b, thought, known in pairs)
        return sum(takewhile(bool, same))

    def part(self, start: int, end: int | None = None) -> Conversation:
        part = slice(start, end)
        return Conversation(self.turns[part], self.thoughts[part], self.calls[part])

    @property
    def opening(self) -> Any:
        """Return the first turn that is no system prompt, which many conversations share."""
        is_asked = (
            isinstance(turn, tuple) or turn["role"] not in SYSTEM_ROLES for turn in self.turns
        )
        return next(itertools.compress(self.turns, is_asked), None)

    def is_like(self, other: Conversation, messages: int) -> tuple[bool, bool]:
        """Return whether the first `messages` have the same thoughts, and the same ids of calls."""
        one, two = self.part(0, messages), other.part(0, messages)
        return one.thoughts == two.thoughts, one.calls == two.calls

    def then(self, other: Conversation) -> Conversation:
        return Conversation(
            self.turns + other.turns, self.thoughts + other.thoughts, self.calls + other.calls
        )


def _value(arguments: str) -> Any:
    with suppress(ValueError):
        return read_json(arguments)
    return arguments
