"""Parse function calls with vLLM's tool parsers, which need vLLM where the worker runs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from buffer.errors import ConfigError
from buffer.wire.rollout import ToolCall
from buffer.wire.sampling import StructuredOutput
from producer_workers.agent_loops.tool_parsers import PARSERS, ParsedTurn, Tools, tool_call
from producer_workers.engines.vllm.api import ALWAYS

log = logging.getLogger("rolloutmq.worker")

_THOUGHT = re.compile(r"\A.*?(?:</think>|\[/THINK\])", re.DOTALL)


class VllmToolParser:
    """A tool parser of vLLM for a tokenizer. Raises ConfigError if it cannot be made."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        own = ", ".join(PARSERS)
        for variable, value in ALWAYS.items():
            os.environ.setdefault(variable, value)
        try:
            manager = import_module("vllm.tool_parsers").ToolParserManager
            protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
        except ImportError as error:
            hint = f"known without vLLM: {own}; install vLLM for its parsers"
            raise ConfigError(f"there is no tool parser {name!r}: {error}", hint=hint) from error
        try:
            self._kind = manager.get_tool_parser(name)
            self._tokenizer = tokenizer
            self._kind(tokenizer, None)
        except KeyError as error:
            known = ", ".join(sorted({*manager.lazy_parsers, *PARSERS}))
            raise ConfigError(
                f"there is no tool parser {name!r}", hint=f"known: {known}"
            ) from error
        except Exception as error:  # a parser may need another package, or tokens of its model
            hint = f"use the parser of this model; without vLLM there are {own}"
            raise ConfigError(
                f"vLLM's tool parser {name!r} cannot be used: {error}", hint=hint
            ) from error
        self._request = protocol.ChatCompletionRequest

    def parse(self, text: str, tools: Tools = None) -> ParsedTurn:
        thought = _THOUGHT.match(text)
        start = thought.end() if thought else 0
        try:
            found = self._extract(text[start:], tools)
        except Exception as error:  # the model gets an error, as for any call that cannot be read
            log.debug("vLLM's parser failed: %s", error)
            return ParsedTurn(
                text[:start], [ToolCall(id="call_0", name="", raw_arguments=text[start:])]
            )
        if not found.tools_called:
            return ParsedTurn(text, [])
        calls = [
            tool_call(number, call.function.name, call.function.arguments)
            for number, call in enumerate(found.tool_calls)
        ]
        return ParsedTurn(text[:start] + (found.content or ""), calls)

    def structure(self, names: Sequence[str]) -> StructuredOutput | None:
        return None

    def _extract(self, text: str, tools: Tools) -> Any:
        asked = {"role": "user", "content": ""}
        request = self._request(model="policy", messages=[asked], tools=tools or None)
        # one for each turn: a parser keeps state
        return self._kind(self._tokenizer, request.tools).extract_tool_calls(text, request)
