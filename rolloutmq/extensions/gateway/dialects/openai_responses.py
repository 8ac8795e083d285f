"""Parse requests for OpenAI's responses, and write their answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, PrivateAttr

from producer_workers.agent_loops.call_json import read_json, write_json
from rolloutmq.extensions.gateway.dialects.dialect import (
    ITEMS,
    FormatHolder,
    Json,
    JsonList,
    MaxTokens,
    ToolRequest,
    event,
    function_tool,
    joined_text,
    result_text,
)
from rolloutmq.extensions.gateway.dialects.openai_chat import plain_message
from rolloutmq.extensions.gateway.history import split_thought
from rolloutmq.extensions.gateway.turn import Ask, SampledTurn, new_name

REFUSED = {
    "background": "the answer comes with the response",
    "conversation": "send the input, or previous_response_id",
    "prompt": "send the input itself",
    "top_logprobs": "ask chat completions for logprobs",
}

# Types of items that are no part of a turn of the model, unless they have its role.
_OTHERS = ("", "message", "function_call_output", "custom_tool_call_output")

_TEXTS = ("input_text", "output_text", "text")

# The arguments of a custom tool, whose input is any text.
_FREE_TEXT: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class _Head(msgspec.Struct):
    role: Any = ""
    type: Any = ""


_HEADS = msgspec.json.Decoder(list[_Head])


def _add(messages: list[Json], item: Any) -> None:
    """Add an input item to messages of chat completions."""
    match item:
        case {"role": "assistant", "content": content}:
            _turn(messages, "content")["content"] = joined_text(content, _TEXTS)
        case {"role": str(role), "content": content}:
            messages.append({"role": role, "content": joined_text(content, _TEXTS)})
        case {"type": "reasoning"}:
            said = item.get("content") or item.get("summary") or []  # none: the client dropped it
            thought = joined_text(said, ("reasoning_text", "summary_text")) or None
            _turn(messages, "reasoning_content")["reasoning_content"] = thought
        case {"type": "function_call", "call_id": str(call), "name": name, "arguments": given}:
            _add_call(messages, call, _whole_name(item.get("namespace"), name), given)
        case {"type": "custom_tool_call", "call_id": str(call), "name": name, "input": str(text)}:
            _add_call(messages, call, name, _arguments_with(text))
        case {
            "type": "function_call_output" | "custom_tool_call_output",
            "call_id": str(call),
            "output": said,
        }:
            text = result_text(said, _TEXTS)
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
        case {"type": kind}:
            raise ValueError(f"items of type {kind} cannot be recorded for training")
        case _:
            raise ValueError("an item has a type, or a role and content")


def _add_call(messages: list[Json], call: str, name: Any, arguments: Any) -> None:
    function = {"name": name, "arguments": arguments}
    calls = _turn(messages).setdefault("tool_calls", [])
    calls.append({"id": call, "type": "function", "function": function})


def _turn(messages: list[Json], part: str = "") -> Json:
    """Return the turn of the model at the end, or a new one: behind calls, or a second `part`."""
    last = messages[-1] if messages else {}
    is_over = part and (part in last or "tool_calls" in last)
    if is_over or last.get("role") != "assistant":
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _messages(given: Any) -> Any:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    messages: list[Json] = []
    for item in given:
        _add(messages, item)
    return list(map(plain_message, messages))


def _arguments_with(text: str) -> str:
    """Return the arguments that a model gave, from the input that its client read in them."""
    with suppress(ValueError):
        if isinstance(read_json(text), dict):  # not in the form of `_FREE_TEXT`
            return text
    return write_json({"input": text})


def _input_in(arguments: str) -> str:
    with suppress(ValueError):
        match read_json(arguments):
            case {"input": str(text), **others} if not others:
                return text
    return arguments


def _whole_name(namespace: Any, name: Any) -> Any:
    return f"{namespace}.{name}" if namespace else name


def _tools(tools: Any, namespace: str = "") -> Any:
    """Return functions of chat completions; those of a namespace have it in their names."""
    if not isinstance(tools, list):
        return tools
    functions: list[Json] = []
    for tool in tools:
        match tool:
            case {"type": "function"}:
                name = _whole_name(namespace, tool.get("name"))
                parameters = tool.get("parameters") or {}
                functions.append(function_tool(name, tool.get("description"), parameters))
            case {"type": "custom"}:
                known = [tool.get("description")]
                if isinstance(form := tool.get("format"), dict) and "definition" in form:
                    known.append(form["definition"])
                described = "\n\n".join(map(str, filter(None, known)))
                functions.append(function_tool(tool.get("name"), described, _FREE_TEXT))
            case {"type": "namespace", "name": str(name), "tools": list(inner)} if not namespace:
                functions += _tools(inner, name)
            case {"type": kind}:
                raise ValueError(f"a tool of type {kind} is not run here: offer functions only")
            case _:
                raise ValueError("each tool has a type")
    return functions


def _names_of_custom(tools: Any) -> list[Any]:
    given = tools if isinstance(tools, list) else []
    return [t.get("name") for t in given if isinstance(t, dict) and t.get("type") == "custom"]


class ResponsesRequest(ToolRequest):
    path = "/v1/responses"
    history = "input"
    refused = REFUSED

    input: Annotated[JsonList, Field(min_length=1), BeforeValidator(_messages)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[JsonList | None, BeforeValidator(_tools)] = None
    custom: Annotated[
        tuple[str, ...], BeforeValidator(_names_of_custom), Field(validation_alias="tools")
    ] = ()
    max_output_tokens: MaxTokens | None = None
    text: FormatHolder = None

    _name: str = PrivateAttr(default_factory=new_name)
    _told: int = PrivateAttr(0)  # events

    @staticmethod
    def plain(items: list[Any]) -> list[Json]:
        return list(_messages(items))

    @staticmethod
    def parts(history: bytes) -> list[bytes]:
        items = zip(_HEADS.decode(history), map(bytes, ITEMS.decode(history)), strict=True)
        runs = groupby(items, lambda i: i[0].role == "assistant" or i[0].type not in _OTHERS)
        return [b",".join(item for _, item in run) for _, run in runs]

    def ask(self) -> Ask:
        return Ask(
            messages=self.input,
            instructions=self.instructions or "",
            previous=(self.previous_response_id or "").removeprefix("resp_"),
            max_tokens=self.max_output_tokens,
            structured=self.text,
            name=self._name,
            **self.of_tools(),
        )

    def answer(self, turn: SampledTurn, pieces: list[str]) -> Json:
        is_cut = turn.made.finish_reason == "length"
        made = len(turn.made.token_ids)
        usage = {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + made,
        }
        return self._begun(turn.name) | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item for item, _ in _items(turn, self.custom)],
            "usage": usage,
        }

    def waiting(self) -> bytes:
        """Return an event of the answer: some clients hear no comments."""
        kind = "in_progress" if self._told else "created"
        return self._event({"type": f"response.{kind}", "response": self._begun(self._name)})

    def failure(self, error: Json) -> bytes:
        failed = self._begun(self._name) | {"status": "failed", "error": error["error"]}
        return self._event({"type": "response.failed", "response": failed})

    def events(self, turn: SampledTurn, pieces: list[str]) -> Iterator[bytes]:
        return map(self._event, self._events(turn))

    def _events(self, turn: SampledTurn) -> Iterator[Json]:
        begun = self._begun(turn.name)
        for kind in ("created", "in_progress")[self._told :]:
            yield {"type": f"response.{kind}", "response": begun}
        for index, (item, parts) in enumerate(_items(turn, self.custom)):
            at = {"output_index": index}
            empty = {**item, **{key: _EMPTY[key] for key in item.keys() & _EMPTY}}
            empty["status"] = "in_progress"
            yield {"type": "response.output_item.added", **at, "item": empty}
            for part in parts:
                yield {**part, **at, "item_id": item["id"]}
            yield {"type": "response.output_item.done", **at, "item": item}
        response = self.answer(turn, [])
        yield {"type": f"response.{response['status']}", "response": response}

    def _event(self, content: Json) -> bytes:
        self._told += 1
        return event({**content, "sequence_number": self._told - 1})

    def _begun(self, name: str) -> Json:
        """Return the response as it is before it has output."""
        asked = self.model_dump(
            include={"model", "instructions", "max_output_tokens", "previous_response_id"}
        )
        frame = {"id": f"resp_{name}", "object": "response", "created_at": int(time.time())}
        unknown = dict.fromkeys(("error", "incomplete_details", "usage"))
        calls = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {**frame, "status": "in_progress", **asked, **unknown, "output": [], **calls}


_EMPTY: Json = {"content": [], "arguments": "", "input": ""}


def _items(turn: SampledTurn, custom: Collection[str]) -> Iterator[tuple[Json, Sequence[Json]]]:
    """Yield the items of the answer, and the events that stream each."""
    thought, text = split_thought(turn.message["content"])
    if thought:
        item: Json = {"id": f"rs_{turn.name}", "type": "reasoning", "summary": []}
        yield _with_text(item, {"type": "reasoning_text", "text": thought}, {})
    if text.strip() or not turn.calls:
        item = {"id": f"msg_{turn.name}", "type": "message", "role": "assistant"}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        yield _with_text({**item, "status": "completed"}, part, {"logprobs": []})
    for call in turn.calls:
        given = call["function"]["arguments"]
        if (name := call["function"]["name"]) in custom:
            yield _custom_call(call["id"], name, _input_in(given))
            continue
        namespace, _, name = name.rpartition(".")
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        item |= {"name": name, "arguments": given, "status": "completed"}
        item |= {"namespace": namespace} if namespace else {}
        kind = "response.function_call_arguments"
        done = {"type": f"{kind}.done", "name": name, "arguments": given}
        yield item, [{"type": f"{kind}.delta", "delta": given}, done]


def _custom_call(call_id: str, name: str, given: str) -> tuple[Json, Sequence[Json]]:
    item = {"id": f"ctc_{call_id}", "type": "custom_tool_call", "call_id": call_id}
    kind = "response.custom_tool_call_input"
    events = [{"type": f"{kind}.delta", "delta": given}, {"type": f"{kind}.done", "input": given}]
    return {**item, "name": name, "input": given, "status": "completed"}, events


def _with_text(item: Json, part: Json, more: Json) -> tuple[Json, Sequence[Json]]:
    kind, text = part["type"], part["text"]
    events: list[Json] = [
        {"type": "response.content_part.added", "part": {**part, "text": ""}},
        {"type": f"response.{kind}.delta", "delta": text, **more},
        {"type": f"response.{kind}.done", "text": text, **more},
        {"type": "response.content_part.done", "part": part},
    ]
    return {**item, "content": [part]}, [{**each, "content_index": 0} for each in events]
