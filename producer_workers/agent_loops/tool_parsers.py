"""Parse function calls in a model's text, in the forms that chat templates use.

    hermes    any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call>
              (Hermes 2, Qwen 2.5 and 3)
    llama     {"name": ..., "parameters": {...}}, alone or after <|python_tag|>,
              several with ; between (Llama 3)
    mistral   [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] (v3),
              or [TOOL_CALLS]name[ARGS]{...} (from v11)

Any other name is a parser of vLLM (`vllm_tool_parser.py`). A thought before the answer (up to
</think> or [/THINK]) calls nothing. Marks within a call's arguments are text. A call that cannot be
parsed has None as its `arguments`: the model gets an error and may try again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from buffer.errors import WireError
from buffer.wire.checks import check_nesting
from buffer.wire.rollout import ToolCall
from buffer.wire.sampling import StructuredOutput

Tools = Sequence[dict[str, Any]] | None  # functions as JSON schemas in OpenAI's form


class ParsedTurn(NamedTuple):
    """A turn: its text before the first call, with its thought, and its calls."""

    content: str
    calls: list[ToolCall]


class ToolParser(Protocol):
    def parse(self, text: str, tools: Tools = None) -> ParsedTurn:
        """Parse one turn of a model that was offered `tools`. Never raises."""
        ...

    def structure(self, names: Sequence[str]) -> StructuredOutput | None:
        """Return the form of a turn that calls one of these functions; None if not expressible."""
        ...


_THOUGHT_ENDS = re.compile(r"</think>|\[/THINK\]")

# The text before the JSON of a call; it captures the name, if the JSON lacks it.
_BEGINS = {
    "hermes": re.compile(r"<tool_call>\s*"),
    "llama": re.compile(r"(?:\A\s*(?:<\|python_tag\|>)?|<\|python_tag\|>|;)\s*(?=\{)"),
    "mistral": re.compile(
        r"\[TOOL_CALLS\]\s*(?:([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{))?"
    ),
}

_HERMES_ENDS = re.compile(r"\s*(?:</tool_call>|\Z)")
_MISTRAL_ENDS = re.compile(r"\s*(?=\[TOOL_CALLS\]|\Z)")

_DECODER = json.JSONDecoder(strict=False)

Calls = Iterator[tuple[str, str]]  # names of calls, and their arguments as JSON


def _hermes(text: str) -> Calls:
    for _, raw in _marked(text, "hermes", _HERMES_ENDS, "</tool_call>"):
        yield _call(raw)


def _llama(text: str) -> Calls:
    if begin := _BEGINS["llama"].match(text):
        yield from map(_call, _objects(text[begin.end() :]))


def _mistral(text: str) -> Calls:
    for name, raw in _marked(text, "mistral", _MISTRAL_ENDS, "[TOOL_CALLS]"):
        listed = None if name else _loads(raw)
        if isinstance(listed, list):
            yield from (_call(orjson.dumps(item).decode()) for item in listed)
        else:
            yield name, raw


# Each finds the calls in the answer of one turn, in order.
PARSERS: dict[str, Callable[[str], Calls]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
}


def calls_in(text: str, parser: str) -> list[ToolCall]:
    calls = PARSERS[parser](split_thought(text, parser)[1])
    return [tool_call(number, *call) for number, call in enumerate(calls)]


def split_thought(text: str, parser: str) -> tuple[str, str]:
    """Split a turn into its thought, up to a mark outside of a call's JSON, and its answer."""
    position = 0
    while mark := _THOUGHT_ENDS.search(text, position):
        call_end = _end_of_call_around(text, position, mark.start(), parser)
        if call_end is None:
            return text[: mark.end()], text[mark.end() :]
        position = call_end
    return "", text


def before_calls(text: str, parser: str) -> str:
    thought, answer = split_thought(text, parser)
    begin = _BEGINS[parser].search(answer)
    return thought + (answer[: begin.start()] if begin else answer)


def _end_of_call_around(text: str, start: int, position: int, parser: str) -> int | None:
    """Return the end of a call's JSON that begins after `start` and extends over `position`."""
    while begin := _BEGINS[parser].search(text, start, position):
        end = _end_of_json(text, begin.end())
        if end is not None and end > position:
            return end
        start = end or begin.end() + 1
    return None


def _marked(text: str, parser: str, ends: re.Pattern[str], closes: str) -> Calls:
    """Yield the name in each mark, and the following JSON and `ends`, or all up to `closes`."""
    position = 0
    while begin := _BEGINS[parser].search(text, position):
        start = begin.end()
        end = _end_of_json(text, start)
        if end is None or not ends.match(text, end):
            closed = text.find(closes, start)
            end = closed if closed >= 0 else len(text)
        yield (begin[1] or "" if begin.re.groups else ""), text[start:end].strip()
        position = end


def _end_of_json(text: str, start: int) -> int | None:
    """Return the end of the JSON object or array that begins at `start`; None without one."""
    if not text.startswith(("{", "["), start):
        return None
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


# Regular expressions of one call; Mistral's mark is a special token, which has no text.
_FORMS = {
    "hermes": '<tool_call>\\n\\{{"name": "({})", "arguments": \\{{[^\\n]*\\}}\\}}\\n</tool_call>',
    "llama": '\\{{"name": "({})", "parameters": \\{{[^\\n]*\\}}\\}}',
}


class OwnToolParser:
    def __init__(self, name: str) -> None:
        self._name = name

    def parse(self, text: str, tools: Tools = None) -> ParsedTurn:
        calls = calls_in(text, self._name)
        return ParsedTurn(before_calls(text, self._name) if calls else text, calls)

    def structure(self, names: Sequence[str]) -> StructuredOutput | None:
        form = _FORMS.get(self._name)
        return (
            StructuredOutput(regex=form.format("|".join(map(re.escape, names)))) if form else None
        )


def tool_parser(name: str, tokenizer: Any) -> ToolParser:
    """Return a parser by name: one of PARSERS or of vLLM's. Raises ConfigError."""
    if name in PARSERS:
        return OwnToolParser(name)
    from producer_workers.agent_loops.vllm_tool_parser import VllmToolParser

    return VllmToolParser(name, tokenizer)


def tool_call(number: int, name: str, raw: str) -> ToolCall:
    arguments = _loads(raw) if name else None
    return ToolCall(
        id=f"call_{number}",
        name=name,
        arguments=arguments if isinstance(arguments, dict) else None,
        raw_arguments="" if isinstance(arguments, dict) else raw,
    )


def _call(text: str) -> tuple[str, str]:
    """Return (name, arguments as JSON) of a call object; for other JSON, the text as arguments."""
    call = _loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "", text
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some templates write the arguments as JSON in a string
        return call["name"], arguments
    return call["name"], orjson.dumps(arguments).decode()


def _objects(text: str) -> Iterator[str]:
    """Yield the JSON objects between `;`, and the rest from the first invalid one; no prose."""
    while "{" in text:
        end = _end_of_json(text, 0) if text.startswith("{") else None
        yield text[:end].strip()
        text = "" if end is None else text[end:].lstrip("; \n")


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid or nested too deep."""
    try:
        value = orjson.loads(text)
        check_nesting("arguments", [value])
    except (orjson.JSONDecodeError, WireError):
        return None
    return value
