"""Recognize the conversations that agents send back, whatever their clients did to them.

A client may drop the thoughts of the model's turns, write the arguments of its calls anew, and
rename the calls. Any other difference begins a new context, which reads everything again; the
reason is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import and_, eq
from typing import Any

import orjson

from producer_workers.agent_loops.tokenizer import SYSTEM_ROLES
from producer_workers.agent_loops.tool_parsers import end_of_thought
from producer_workers.gateway.segment import Messages, Segment

_THOUGHT = ("reasoning_content", "reasoning")  # fields in which clients keep a thought apart
_BEGINS = ("<think>", "[THINK]")
_ENDS = ("</think>", "[/THINK]")


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
    for mark in _ENDS:
        thought = thought.removesuffix(mark)
    return thought.strip(), text[end:].lstrip()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What must be the same in a conversation that continues another.

    `turns` are its messages without thoughts; calls have numbers in place of ids. A thought of None
    was not sent.
    """

    turns: list[Any]
    thoughts: list[str | None]
    calls: list[Any]  # their ids, in order

    @classmethod
    def of(cls, messages: Messages) -> Conversation:
        made = cls([], [], [])
        numbers: dict[Any, int] = {}
        for message in messages:
            thought = None
            turn: Any = message
            if message["role"] == "assistant":
                thought, turn = _of_model(message)
                for call in message.get("tool_calls", ()):
                    numbers[call["id"]] = len(made.calls)
                    made.calls.append(call["id"])
            elif "tool_call_id" in message:
                called = message["tool_call_id"]
                turn = {**message, "tool_call_id": numbers.get(called, called)}
            made.turns.append(turn)
            made.thoughts.append(thought)
        return made

    def continues(self, known: Conversation) -> bool:
        return len(self.turns) > len(known.turns) == self.shared(known)

    def shared(self, other: Conversation) -> int:
        """Return how many first messages both have."""
        thoughts = map(_same_thought, other.thoughts, self.thoughts)
        return sum(takewhile(bool, map(and_, map(eq, self.turns, other.turns), thoughts)))

    def with_turn(self, message: dict[str, Any]) -> Conversation:
        """Return this with a message of the model."""
        last = Conversation.of([message])
        parts = (self.turns + last.turns, self.thoughts + last.thoughts, self.calls + last.calls)
        return Conversation(*parts)

    def after(self, known: Conversation | None) -> Conversation:
        """Return this, which continues `known`, with the thoughts of that."""
        if known is None:
            return self
        thoughts = [*known.thoughts, *self.thoughts[len(known.thoughts) :]]
        return Conversation(self.turns, thoughts, self.calls)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A recorded context, and its conversation as its agent sends it."""

    said: Conversation
    segment: Segment

    def length(self) -> int:
        return len(self.said.turns)


def continued_by(
    known: Sequence[Known], given: Conversation, tools: Any, ends: Collection[Segment]
) -> Known | None:
    """Return the context that a request continues; if several fit, the one that is most alike.

    `ends` are segments that nothing continues yet.
    """

    def likeness(one: Known) -> tuple[bool, bool, bool]:
        turns, calls = len(one.said.turns), len(one.said.calls)
        return (
            one.said.thoughts == given.thoughts[:turns],
            one.said.calls == given.calls[:calls],
            one.segment in ends,
        )

    offered = [one for one in known if one.segment.tools == tools]
    longest_first = sorted(offered, key=Known.length, reverse=True)
    for _, equally_long in groupby(longest_first, Known.length):
        if fitting := [one for one in equally_long if given.continues(one.said)]:
            return max(fitting, key=likeness)
    return None


def why_new(known: Sequence[Known], given: Conversation) -> str:
    """Return why a request continues no context: a word for its count; "" for the first one.

    conversation: another one began. again: the same was asked again. tools: others were offered.
    system: the system prompt was changed. turn: a turn of the model was changed. history: another
    earlier message was changed or cut.
    """
    if not known:
        return ""
    nearest = max(known, key=lambda one: given.shared(one.said)).said
    shared = given.shared(nearest)
    if not any(map(_is_asked, given.turns[:shared])):
        begins = [_without_system(each.turns)[:1] for each in [given, *(one.said for one in known)]]
        is_known = bool(begins[0]) and begins[0] in begins[1:]
        return "system" if is_known else "conversation"
    if shared == len(given.turns):
        return "again"
    if shared == len(nearest.turns):
        return "tools"
    both = isinstance(nearest.turns[shared], tuple) and isinstance(given.turns[shared], tuple)
    return "turn" if both else "history"


def _same_thought(known: str | None, given: str | None) -> bool:
    return given is None or given == (known or "")


def _of_model(message: dict[str, Any]) -> tuple[str | None, Any]:
    """Return the thought of the model's message, and what else must be the same in it."""
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
    return thought, (rest, text.strip(), calls)


def _value(arguments: str) -> Any:
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(arguments)
    return arguments


def _is_asked(turn: Any) -> bool:
    """Return whether it is more than a system prompt, which many conversations share."""
    return isinstance(turn, tuple) or turn["role"] not in SYSTEM_ROLES


def _without_system(turns: Sequence[Any]) -> list[Any]:
    return [turn for turn in turns if _is_asked(turn)]
