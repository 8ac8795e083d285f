"""Parse function calls in a model's text: in Hermes' form here, in any other by vLLM's parsers.

    hermes    any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call>
              (Hermes 2, Qwen 2.5 and 3)

A thought before the answer (up to </think> or [/THINK]) calls nothing. Marks within a call's
arguments are text. A call that cannot be parsed, or has an integer over 64 bits, which no group can
store, has None as its `arguments`, and `raw_arguments`: an agent gets these, and with tools of the
task the model gets an error and may try again.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import msgpack

from buffer.errors import ConfigError, WireError
from buffer.wire.checks import check_plain
from buffer.wire.rollout import ToolCall
from buffer.wire.sampling import StructuredOutput
from producer_workers.agent_loops.call_json import read_json, write_json

log = logging.getLogger("rolloutmq.worker")

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


def tool_parser(name: str, tokenizer: Any) -> ToolParser:
    """Return the parser "hermes", or vLLM's of that name. Raises ConfigError."""
    return HermesParser() if name == "hermes" else VllmToolParser(name, tokenizer)


# -- Hermes ------------------------------------------------------------------

_THOUGHT_ENDS = re.compile(r"</think>|\[/THINK\]")
_BEGINS = re.compile(r"<tool_call>\s*")
_ENDS = re.compile(r"\s*(?:</tool_call>|\Z)")
_DECODER = json.JSONDecoder(strict=False)
_FORM = '<tool_call>\\n\\{{"name": "({})", "arguments": \\{{[^\\n]*\\}}\\}}\\n</tool_call>'


class HermesParser:
    def parse(self, text: str, tools: Tools = None) -> ParsedTurn:
        start = end_of_thought(text)
        calls = [_call(number, raw) for number, raw in enumerate(_calls(text, start))]
        begin = _BEGINS.search(text, start)
        return ParsedTurn(text[: begin.start()] if begin and calls else text, calls)

    def structure(self, names: Sequence[str]) -> StructuredOutput | None:
        return StructuredOutput(regex=_FORM.format("|".join(map(re.escape, names))))


def end_of_thought(text: str) -> int:
    """Return the end of a turn's thought, at a mark outside of a call's JSON; 0 without one."""
    position = 0
    while mark := _THOUGHT_ENDS.search(text, position):
        position = _end_of_call_around(text, position, mark.start()) or 0
        if not position:
            return mark.end()
    return 0


def _end_of_call_around(text: str, start: int, position: int) -> int | None:
    """Return the end of a call's JSON that begins after `start` and extends over `position`."""
    while begin := _BEGINS.search(text, start, position):
        end = _end_of_json(text, begin.end())
        if end is not None and end > position:
            return end
        start = end or begin.end() + 1
    return None


def _calls(text: str, position: int) -> Iterator[str]:
    """Yield the JSON of each call, or all up to its end mark."""
    while begin := _BEGINS.search(text, position):
        start = begin.end()
        end = _end_of_json(text, start)
        if end is None or not _ENDS.match(text, end):
            closed = text.find("</tool_call>", start)
            end = closed if closed >= 0 else len(text)
        yield text[start:end].strip()
        position = end


def _end_of_json(text: str, start: int) -> int | None:
    """Return the end of the JSON object or array that begins at `start`; None without one."""
    if not text.startswith(("{", "["), start):
        return None
    try:
        return _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _call(number: int, text: str) -> ToolCall:
    """Return a call object as a call; other JSON has no name, and the text as arguments."""
    call = _loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _tool_call(number, "", text)
    arguments = call.get("arguments", call.get("parameters", {}))
    # some templates write the arguments as JSON in a string
    raw = arguments if isinstance(arguments, str) else write_json(arguments)
    return _tool_call(number, call["name"], raw)


def _tool_call(number: int, name: str, raw: str) -> ToolCall:
    arguments = _loads(raw) if name else None
    if isinstance(arguments, dict):
        raw = write_json(arguments)
        with suppress(OverflowError):  # an integer over 64 bits
            msgpack.packb(arguments)
            return ToolCall(f"call_{number}", name, arguments)
    return ToolCall(f"call_{number}", name, raw_arguments=raw)


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid or nested too deep."""
    try:
        value = read_json(text)
        check_plain("arguments", [value])
    except (ValueError, WireError):
        return None
    return value


# -- vLLM --------------------------------------------------------------------

_THOUGHT = re.compile(r"\A.*?(?:</think>|\[/THINK\])", re.DOTALL)


class VllmToolParser:
    """A tool parser of vLLM, where it is installed. Raises ConfigError if it cannot be made."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from producer_workers.engines.vllm.api import ALWAYS

        for variable, value in ALWAYS.items():
            os.environ.setdefault(variable, value)
        try:
            manager = import_module("vllm.tool_parsers").ToolParserManager
            protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
        except ImportError as error:
            hint = "known without vLLM: hermes; install vLLM for its parsers"
            raise ConfigError(f"there is no tool parser {name!r}: {error}", hint=hint) from error
        try:
            self._kind = manager.get_tool_parser(name)
            self._tokenizer = tokenizer
            self._kind(tokenizer, None)
        except KeyError as error:
            known = ", ".join(sorted({*manager.lazy_parsers, "hermes"}))
            raise ConfigError(
                f"there is no tool parser {name!r}", hint=f"known: {known}"
            ) from error
        except Exception as error:  # a parser may need another package, or tokens of its model
            raise ConfigError(
                f"vLLM's tool parser {name!r} cannot be used: {error}",
                hint="use the parser of this model; without vLLM there is hermes",
            ) from error
        self._request = protocol.ChatCompletionRequest

    def parse(self, text: str, tools: Tools = None) -> ParsedTurn:
        thought = _THOUGHT.match(text)
        start = thought.end() if thought else 0
        try:
            asked = {"role": "user", "content": ""}
            request = self._request(model="policy", messages=[asked], tools=tools or None)
            # one for each turn: a parser keeps state
            parser = self._kind(self._tokenizer, request.tools)
            found = parser.extract_tool_calls(text[start:], request)
        except Exception as error:  # the model gets an error, as for any call that cannot be read
            log.debug("vLLM's parser failed: %s", error)
            return ParsedTurn(text[:start], [_tool_call(0, "", text[start:])])
        if not found.tools_called:
            return ParsedTurn(text, [])
        calls = [
            _tool_call(number, call.function.name, call.function.arguments)
            for number, call in enumerate(found.tool_calls)
        ]
        return ParsedTurn(text[:start] + (found.content or ""), calls)

    def structure(self, names: Sequence[str]) -> StructuredOutput | None:
        return None
