"""How models write a call of a function, by the chat templates that are in use.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them (Hermes 2, Qwen 2.5 and 3)
    llama     {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>, several with ; between (Llama 3)
    mistral   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] (v3), or [TOOL_CALLS]name[ARGS]{...} (from v11)

What a model thinks before it speaks (up to </think> or [/THINK]) calls nothing. Marks within the
texts of a call's arguments are text. A parser never raises: what looks like a call and cannot be
read becomes one whose `arguments` are None, so that the model is told, and may try again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from buffer.errors import WireError
from buffer.model.rollout import ToolCall
from buffer.model.wire import check_nesting

ToolParser = Callable[[str], list[ToolCall]]

_THOUGHT_ENDS = re.compile(r"</think>|\[/THINK\]")

_BEGINS = {
    "hermes": re.compile(r"<tool_call>\s*"),
    "llama": re.compile(r"(?:\A\s*(?:<\|python_tag\|>)?|<\|python_tag\|>|;)\s*(?=\{)"),
    "mistral": re.compile(
        r"\[TOOL_CALLS\]\s*(?:([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{))?"
    ),
}
"""What stands before the JSON of a call; a name, where it is not in there."""

_HERMES_ENDS = re.compile(r"\s*(?:</tool_call>|\Z)")
_MISTRAL_ENDS = re.compile(r"\s*(?=\[TOOL_CALLS\]|\Z)")

_DECODER = json.JSONDecoder(strict=False)


def parse_hermes(text: str) -> list[ToolCall]:
    """The calls in the text of one turn, in order."""
    marked = _marked(text, "hermes", _HERMES_ENDS, "</tool_call>")
    return _number(_call(text[start:end].strip()) for _, start, end in marked)


def parse_llama(text: str) -> list[ToolCall]:
    if begin := _BEGINS["llama"].match(text):
        return _number(_call(part) for part in _objects(text[begin.end() :]))
    return []


def parse_mistral(text: str) -> list[ToolCall]:
    found: list[tuple[str, str]] = []
    for name, start, end in _marked(text, "mistral", _MISTRAL_ENDS, "[TOOL_CALLS]"):
        raw = text[start:end].strip()
        listed = None if name else _loads(raw)
        if isinstance(listed, list):
            found += [_call(orjson.dumps(item).decode()) for item in listed]
        else:
            found.append((name, raw))
    return _number(found)


def split_thought(text: str, parser: str) -> tuple[str, str]:
    """(what a turn thinks, with the mark that ends it; what it says). A mark within a call's JSON
    ends no thought.
    """
    place = 0
    while mark := _THOUGHT_ENDS.search(text, place):
        call = _end_of_call_around(text, place, mark.start(), parser)
        if call is None:
            return text[: mark.end()], text[mark.end() :]
        place = call
    return "", text


def before_calls(text: str, parser: str) -> str:
    """What a turn with calls says before the first one, its thought included."""
    thought, said = split_thought(text, parser)
    begin = _BEGINS[parser].search(said)
    return thought + (said[: begin.start()] if begin else said)


def _end_of_call_around(text: str, start: int, place: int, parser: str) -> int | None:
    """Where the JSON of a call ends that began behind `start` and goes on at `place`."""
    while begin := _BEGINS[parser].search(text, start, place):
        end = _end_of_json(text, begin.end())
        if end is not None and end > place:
            return end
        start = end or begin.end() + 1
    return None


def _marked(
    text: str, parser: str, ends: re.Pattern[str], closes: str
) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of what stands behind each mark: JSON and `ends`, or else all up to
    `closes`.
    """
    place = 0
    while begin := _BEGINS[parser].search(text, place):
        start = begin.end()
        end = _end_of_json(text, start)
        if end is None or not ends.match(text, end):
            closed = text.find(closes, start)
            end = closed if closed >= 0 else len(text)
        yield (begin[1] or "" if begin.re.groups else ""), start, end
        place = end


def _end_of_json(text: str, start: int) -> int | None:
    """The place behind the JSON object or array that begins at `start`; None where there is none."""
    if not text.startswith(("{", "["), start):
        return None
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _of_what_is_said(name: str, parse: ToolParser) -> ToolParser:
    return lambda text: parse(split_thought(text, name)[1])


PARSERS: dict[str, ToolParser] = {
    name: _of_what_is_said(name, parse)
    for name, parse in {
        "hermes": parse_hermes,
        "llama": parse_llama,
        "mistral": parse_mistral,
    }.items()
}


def _number(calls: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> list[ToolCall]:
    return [_tool_call(place, name, arguments) for place, (name, arguments) in enumerate(calls)]


def _tool_call(place: int, name: str, raw: str) -> ToolCall:
    arguments = _loads(raw) if name else None
    return ToolCall(
        id=f"call_{place}",
        name=name,
        arguments=arguments if isinstance(arguments, dict) else None,
        raw_arguments="" if isinstance(arguments, dict) else raw,
    )


def _call(text: str) -> tuple[str, str]:
    """(name, arguments as JSON) of one call object; the text itself as arguments where it is none."""
    call = _loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "", text
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some templates write the arguments as a text of JSON
        return call["name"], arguments
    return call["name"], orjson.dumps(arguments).decode()


def _objects(text: str) -> Iterator[str]:
    """JSON objects that follow each other with ; between; the rest where one cannot be read. Prose
    calls nothing.
    """
    while "{" in text:
        end = _end_of_json(text, 0) if text.startswith("{") else None
        yield text[:end].strip()
        text = "" if end is None else text[end:].lstrip("; \n")


def _loads(text: str) -> Any:
    """The value of a text of JSON; None where it is none, or nested deeper than a group may be."""
    try:
        value = orjson.loads(text)
        check_nesting([value])
    except (orjson.JSONDecodeError, WireError):
        return None
    return value
