"""Parse requests for OpenAI's responses, and write their answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from producer_workers.gateway.dialect import (
    AgentRequest,
    Json,
    MaxTokens,
    event,
    function_tool,
    joined_text,
    must_call,
)
from producer_workers.gateway.history import split_thought
from producer_workers.gateway.openai_api import plain_message, structure_of
from producer_workers.gateway.turn import Ask, SampledTurn

REFUSED = {
    "background": "the answer comes with the response",
    "conversation": "send the input, or previous_response_id",
    "prompt": "send the input itself",
    "top_logprobs": "ask chat completions for logprobs",
}

_TEXTS = ("input_text", "output_text", "text")


class _Conversation:
    """The messages of chat completions that input items are."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._turn: Json | None = None  # the model's, which further items may belong to

    def add(self, item: Any) -> None:
        match item:
            case {"role": "assistant", "content": content}:
                self._part("content", joined_text(content, _TEXTS))
            case {"role": str(role), "content": content}:
                self._other({"role": role, "content": joined_text(content, _TEXTS)})
            case {"type": "reasoning"}:
                self._part("reasoning_content", _thought(item))
            case {"type": "function_call", "call_id": str(call), "name": name, "arguments": given}:
                function = {"name": _whole_name(item.get("namespace"), name), "arguments": given}
                self._call({"id": call, "type": "function", "function": function})
            case {"type": "function_call_output", "call_id": str(call), "output": said}:
                text = joined_text(said, _TEXTS)
                self._other({"role": "tool", "tool_call_id": call, "content": text})
            case {"type": kind}:
                raise ValueError(f"items of type {kind} cannot be recorded for training")
            case _:
                raise ValueError("an item has a type, or a role and content")

    def _part(self, name: str, text: str | None) -> None:
        """Begin a turn of the model, or complete one that has no such part and no calls yet."""
        if self._turn is None or name in self._turn or "tool_calls" in self._turn:
            self._turn = self._begin()
        self._turn[name] = text

    def _call(self, call: Json) -> None:
        if self._turn is None:
            self._turn = self._begin()
        self._turn.setdefault("tool_calls", []).append(call)

    def _begin(self) -> Json:
        self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _other(self, message: Json) -> None:
        self._turn = None
        self.messages.append(message)


def _thought(item: Json) -> str | None:
    """Return the text of a thought; None if the client has dropped it."""
    return joined_text(item["content"], ("reasoning_text",)) if item.get("content") else None


def _messages(given: Any) -> Any:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    conversation = _Conversation()
    for item in given:
        conversation.add(item)
    return [plain_message(message) for message in conversation.messages]


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
            case {"type": "namespace", "name": str(name), "tools": list(inner)} if not namespace:
                functions += _tools(inner, name)
            case {"type": kind}:
                raise ValueError(f"a tool of type {kind} is not run here: offer functions only")
            case _:
                raise ValueError("each tool has a type")
    return functions


def _format(text: Any) -> Any:
    """Return the structure that `text.format` demands."""
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return structure_of(form)


class FunctionChoice(BaseModel):
    type: Literal["function"]
    name: str


class ResponsesRequest(AgentRequest):
    path = "/v1/responses"
    refused = REFUSED

    input: Annotated[list[Json], Field(min_length=1), BeforeValidator(_messages)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Json] | None, BeforeValidator(_tools)] = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    max_output_tokens: MaxTokens | None = None
    text: Json | None = None

    @model_validator(mode="after")
    def _can_be_asked(self) -> ResponsesRequest:
        self.ask()
        return self

    def ask(self) -> Ask:
        choice = self.tool_choice
        wanted = choice.name if isinstance(choice, FunctionChoice) else choice == "required" or None
        return Ask(
            messages=self.input,
            instructions=self.instructions or "",
            previous=(self.previous_response_id or "").removeprefix("resp_"),
            tools=None if choice == "none" else self.tools or None,
            max_tokens=self.max_output_tokens,
            structured=_format(self.text),
            call_one_of=must_call(self.tools, wanted),
        )

    def answer(self, turn: SampledTurn, pieces: list[str]) -> Json:
        was_cut = turn.made.finish_reason == "length"
        end = {"status": "incomplete" if was_cut else "completed"}
        why = {"incomplete_details": {"reason": "max_output_tokens"} if was_cut else None}
        output = [item for item, _ in _items(turn)]
        return {**self._begun(turn), **end, **why, "output": output, "usage": _usage(turn)}

    def events(self, turn: SampledTurn, pieces: list[str]) -> Iterator[bytes]:
        for number, each in enumerate(self._events(turn)):
            yield event({**each, "sequence_number": number})

    def _events(self, turn: SampledTurn) -> Iterator[Json]:
        begun = self._begun(turn)
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, (item, parts) in enumerate(_items(turn)):
            at = {"output_index": index}
            empty = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
            yield {"type": "response.output_item.added", **at, "item": empty}
            for part in parts:
                yield {**part, **at, "item_id": item["id"]}
            yield {"type": "response.output_item.done", **at, "item": item}
        response = self.answer(turn, [])
        yield {"type": f"response.{response['status']}", "response": response}

    def _begun(self, turn: SampledTurn) -> Json:
        """Return the response as it is before it has output; the real API repeats the request."""
        return {
            "id": f"resp_{turn.name}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self.previous_response_id,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
            "metadata": {},
        }


_EMPTY: dict[str, Json] = {
    "message": {"content": []},
    "reasoning": {"content": []},
    "function_call": {"arguments": ""},
}


def _items(turn: SampledTurn) -> Iterator[tuple[Json, Sequence[Json]]]:
    """Yield the items of the answer, and the events that stream each."""
    thought, text = split_thought(turn.message["content"])
    if thought:
        said = {"type": "reasoning_text", "text": thought}
        known: Json = {"id": f"rs_{turn.name}", "type": "reasoning", "summary": []}
        done: Json = {"text": thought}
        yield {**known, "content": [said]}, _part("reasoning_text", said, thought, done)
    if text.strip() or not turn.calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        known = {"id": f"msg_{turn.name}", "type": "message", "role": "assistant"}
        done = {"text": text, "logprobs": []}
        item = {**known, "status": "completed", "content": [part]}
        yield item, _part("output_text", part, text, done)
    for call in turn.calls:
        given = call["function"]["arguments"]
        known = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        namespace, _, name = call["function"]["name"].rpartition(".")
        where = {"name": name, **({"namespace": namespace} if namespace else {})}
        item = {**known, **where, "arguments": given, "status": "completed"}
        kind = "response.function_call_arguments"
        yield (
            item,
            [
                {"type": f"{kind}.delta", "delta": given},
                {"type": f"{kind}.done", "name": name, "arguments": given},
            ],
        )


def _part(kind: str, part: Json, text: str, done: Json) -> list[Json]:
    at = {"content_index": 0}
    logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": f"response.{kind}.delta", **at, "delta": text, **logprobs},
        {"type": f"response.{kind}.done", **at, **done},
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _usage(turn: SampledTurn) -> Json:
    made = len(turn.made.token_ids)
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_tokens + made,
    }
