"""Parse requests for Anthropic's messages, and write their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from producer_workers.agent_loops.call_json import read_json, write_json
from rolloutmq.extensions.gateway.dialects.dialect import (
    FormatHolder,
    Json,
    JsonList,
    MaxTokens,
    Stops,
    ToolRequest,
    event,
    function_tool,
    joined_text,
    result_text,
)
from rolloutmq.extensions.gateway.history import split_thought
from rolloutmq.extensions.gateway.turn import Ask, SampledTurn

REFUSED = dict.fromkeys(("mcp_servers", "container"), "offer functions as tools")

# Claude Code begins its system prompt with a block that changes with each request.
_CHANGING = "x-anthropic-billing-header"

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_OTHER_CONTENT = "only text, tool_use, tool_result and thinking can be asked"


def _system(content: Any) -> str:
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return joined_text([block for block in blocks if not _changes(block)])


def _changes(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(_CHANGING)


def _tool(tool: Any) -> Json:
    match tool:
        case {"name": name, "input_schema": schema}:
            return function_tool(name, tool.get("description"), schema)
        case {"type": kind}:
            raise ValueError(f"a tool of type {kind} runs at Anthropic: offer functions only")
    raise ValueError("each tool has a name and an input_schema")


def _tools(tools: Any) -> Any:
    return [_tool(tool) for tool in tools] if isinstance(tools, list) else tools


def _messages(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    return [plain for message in messages for plain in _plain(message)]


def _plain(message: Any) -> Iterable[Json]:
    """Return the messages of chat completions that say the same as one of Anthropic's."""
    match message:
        case {"role": "assistant", "content": content}:
            return [_of_model(_blocks(content))]
        case {"role": "user", "content": content}:
            return _of_user(_blocks(content))
        case {"role": "system", "content": content}:
            return [{"role": "system", "content": _system(content)}]
    raise ValueError("a message has a role (user, assistant or system) and content")


def _blocks(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _of_model(blocks: Sequence[Any]) -> Json:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": given}:
                function = {"name": name, "arguments": _arguments(given)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise ValueError(_OTHER_CONTENT)
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(given: Any) -> str:
    match given:
        case {"INVALID_JSON": str(text)} if len(given) == 1:  # _UNREADABLE
            return text
        case dict():
            return write_json(given)
    raise ValueError("the input of a tool_use is an object")


def _of_user(blocks: Sequence[Any]) -> Iterator[Json]:
    """Yield a message for each result of a tool, and for the texts between them."""
    texts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                if texts:
                    yield {"role": "user", "content": "".join(texts)}
                    texts = []
                said = result_text(block.get("content") or "")
                yield {"role": "tool", "tool_call_id": call_id, "content": said}
            case _:
                raise ValueError(_OTHER_CONTENT)
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


class MessagesRequest(ToolRequest):
    path = "/v1/messages"
    history = "messages"
    refused = REFUSED

    messages: Annotated[JsonList, Field(min_length=1), BeforeValidator(_messages)]
    system: Annotated[str, BeforeValidator(_system)] = ""
    tools: Annotated[JsonList | None, BeforeValidator(_tools)] = None
    max_tokens: MaxTokens | None = None
    stop_sequences: Stops | None = None
    output_config: FormatHolder = None

    @staticmethod
    def plain(items: list[Any]) -> list[Json]:
        return list(_messages(items))

    def ask(self) -> Ask:
        return Ask(
            messages=self.messages,
            instructions=self.system,
            max_tokens=self.max_tokens,
            stops=self.stop_sequences or (),
            structured=self.output_config,
            **self.of_tools(),
        )

    def answer(self, turn: SampledTurn, pieces: list[str]) -> Json:
        usage = _usage(turn, len(turn.made.token_ids))
        return {**self._frame(turn, list(_blocks_of(turn)), usage), **_end(turn)}

    def events(self, turn: SampledTurn, pieces: list[str]) -> Iterator[bytes]:
        yield event({"type": "message_start", "message": self._frame(turn, [], _usage(turn, 0))})
        for index, block in enumerate(_blocks_of(turn)):
            at = {"index": index}
            empty = {**block, **{key: _EMPTY[key] for key in block.keys() & _EMPTY}}
            yield event({"type": "content_block_start", **at, "content_block": empty})
            for delta in _deltas(block):
                yield event({"type": "content_block_delta", **at, "delta": delta})
            yield event({"type": "content_block_stop", **at})
        usage = _usage(turn, len(turn.made.token_ids))
        yield event({"type": "message_delta", "delta": _end(turn), "usage": usage})
        yield event({"type": "message_stop"})

    def waiting(self) -> bytes:
        return event({"type": "ping"})

    def failure(self, error: Json) -> bytes:
        return event(error)

    @staticmethod
    def error(status: int, message: str, code: str, field: str | None) -> Json:
        if code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # as agents recognize it
        told = {"type": _ERRORS.get(status, "api_error"), "message": message}
        return {"type": "error", "error": told, "request_id": None}

    def _frame(self, turn: SampledTurn, content: list[Json], usage: Json) -> Json:
        kind = {"type": "message", "role": "assistant", "model": self.model}
        end = {"stop_reason": None, "stop_sequence": None}
        return {"id": f"msg_{turn.name}", **kind, "content": content, **end, "usage": usage}


class CountRequest(MessagesRequest):
    path = "/v1/messages/count_tokens"
    counts = True


_EMPTY: Json = {"thinking": "", "signature": "", "text": "", "input": {}}


def _blocks_of(turn: SampledTurn) -> Iterator[Json]:
    thought, text = split_thought(turn.message["content"])
    if thought:
        yield {"type": "thinking", "thinking": thought, "signature": turn.name}
    if text.strip():
        yield {"type": "text", "text": text}
    for call in turn.calls:
        name, given = call["function"]["name"], call["function"]["arguments"]
        arguments: Any = None
        with suppress(ValueError):
            arguments = read_json(given)
        if not isinstance(arguments, dict):
            # as Anthropic's guide passes on arguments that are no JSON
            arguments = {"INVALID_JSON": given}
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _deltas(block: Json) -> Iterator[Json]:
    """Yield the events that stream a block."""
    if block["type"] == "tool_use":
        yield {"type": "input_json_delta", "partial_json": write_json(block["input"])}
    for key in ("thinking", "signature", "text"):
        if key in block:
            yield {"type": f"{key}_delta", key: block[key]}


def _end(turn: SampledTurn) -> Json:
    reason = "stop_sequence" if turn.stop else _STOP_REASONS[turn.finish_reason]
    return {"stop_reason": reason, "stop_sequence": turn.stop or None}


def _usage(turn: SampledTurn, made: int) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": turn.prompt_tokens, **cached, "output_tokens": made}
