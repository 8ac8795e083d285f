"""Find the conversation of a session that began with the prompt of its task.

Programs ask for more than their answer: titles, summaries, memories, answers of sub-agents. What is
judged is the last turn of the task's conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from producer_workers.agent_loops.tokenizer import SYSTEM_ROLES
from rolloutmq.extensions.gateway.segment import Segment


def of_task(segments: Sequence[Segment], question: str) -> list[Segment]:
    """Return the segments of the task's conversation, in order; `segments` are not empty.

    It begins with the first segment in which `question` is asked and tools are offered, else with
    the first in which it is asked; if it is asked nowhere, with the first segment, of those at once
    one that offers tools. A segment is part of it if it has the system prompt and the tools of
    another part; or if what it read last of the model is a turn of another part, and it answers
    calls of that turn, has no other system prompt, or offers the same tools.
    """

    def fitness(segment: Segment) -> tuple[bool, bool]:
        messages = segment.messages[: segment.ends[0].messages - 1]
        asks = any(question in str(each["content"]) for each in messages)
        is_early = asks or not segment.ends[0].after
        return asks, is_early and isinstance(segment.tools, list)

    asked = sorted(segments, key=lambda segment: segment.ends[0].after)
    own = [max(asked, key=fitness)]
    for segment in asked:
        if segment not in own and any(_carries_on(segment, known) for known in own):
            own.append(segment)
    return [segment for segment in segments if segment in own]


def why_other(segment: Segment, own: Sequence[Segment]) -> str:
    """Return in what a segment of another conversation differs from the task's: system or tools."""
    prompts = [_system_prompt(each) for each in own]
    return "other_tools" if _system_prompt(segment) in prompts else "other_system"


def _carries_on(new: Segment, known: Segment) -> bool:
    prompt, has_tools = _system_prompt(new), new.tools == known.tools
    has_prompt = prompt == _system_prompt(known)
    if has_prompt and has_tools:
        return True
    read = new.messages[: new.ends[0].messages - 1]
    turns = [n for n, message in enumerate(read) if message["role"] == "assistant"]
    if not turns:
        return False
    last = new.said.turns[turns[-1]]
    is_known = any(last == known.said.turns[end.messages - 1] for end in known.ends)
    is_called = bool(read[turns[-1]].get("tool_calls"))
    is_alike = has_prompt or not prompt or (has_tools and isinstance(new.tools, list))
    return is_known and (is_called or is_alike)


def _system_prompt(segment: Segment) -> list[object]:
    first = takewhile(lambda message: message["role"] in SYSTEM_ROLES, segment.messages)
    return [message["content"] for message in first]
