"""How models write a call of a function, by the chat templates that are in use.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them (Hermes 2, Qwen 2.5 and 3)
    llama     {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>, several with ; between (Llama 3)
    mistral   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] (v3), or [TOOL_CALLS]name{...} (v11)

What a model thinks before it speaks (up to </think>) calls nothing. A parser never raises: what looks like a call and
cannot be read becomes one whose `arguments` are None, so that the model is told, and may try again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from buffer.rollout import ToolCall

ToolParser = Callable[[str], list[ToolCall]]

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_MISTRAL_V11 = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*?\})\s*(?=\[TOOL_CALLS\]|$)", re.DOTALL)


def parse_hermes(text: str) -> list[ToolCall]:
    """The calls in the text of one turn, in order."""
    return _number(_call(found[1]) for found in _HERMES.finditer(text))


def parse_llama(text: str) -> list[ToolCall]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return []
    return _number(_call(part) for part in _objects(body))


def parse_mistral(text: str) -> list[ToolCall]:
    if v11 := list(_MISTRAL_V11.finditer(text)):
        return _number((found[1], found[2]) for found in v11)
    _, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return []
    listed = _loads(body.strip())
    if not isinstance(listed, list):
        return _number([("", body.strip())])
    return _number(_call(orjson.dumps(item).decode()) for item in listed)


def split_thought(text: str) -> tuple[str, str]:
    """(what a turn thinks, with the mark that ends it; what it says)"""
    thought, mark, said = text.partition("</think>")
    return (thought + mark, said) if mark else ("", text)


def _of_what_is_said(parse: ToolParser) -> ToolParser:
    return lambda text: parse(split_thought(text)[1])


PARSERS: dict[str, ToolParser] = {
    name: _of_what_is_said(parse)
    for name, parse in {"hermes": parse_hermes, "llama": parse_llama, "mistral": parse_mistral}.items()
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
    """JSON objects that follow each other with ; between; the rest where one cannot be read."""
    start, depth, in_string, escaped = 0, 0, False, False
    for place, letter in enumerate(text):
        if in_string:
            in_string, escaped = escaped or letter != '"', letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            if depth == 0 and letter == "}":
                yield text[start : place + 1].lstrip("; \n")
                start = place + 1
    if depth or in_string:
        yield text[start:].lstrip("; \n")


def _loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
