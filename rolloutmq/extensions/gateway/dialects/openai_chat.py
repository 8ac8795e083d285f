"""Parse requests for OpenAI's chat and text completions, and write their answers."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from producer_workers.agent_loops.call_json import read_json, write_json
from rolloutmq.extensions.gateway.dialects.dialect import (
    AgentRequest,
    Json,
    JsonList,
    MaxTokens,
    ResponseFormat,
    Stop,
    Stops,
    Tokens,
    ToolRequest,
    as_list,
    data_events,
    joined_text,
    result_text,
)
from rolloutmq.extensions.gateway.turn import Ask, SampledTurn

_TEXT_KEYS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning")

# Fields of a message that are part of the conversation, but that no chat template reads.
REFUSED_IN_MESSAGES = {
    "function_call": "use tool_calls",
    "audio": "only text can be asked",
    "refusal": "put its text into content",
}

# Fields that would change what is read or sampled, with advice. Null and empty values are ignored.
REFUSED = {
    "functions": "offer tools",
    "function_call": "offer tools",
    "top_logprobs": "only the logprob of what was sampled is known",
    "prompt_logprobs": "only the logprob of what was sampled is known",
    "audio": "only text can be asked",
    "web_search_options": "offer a tool",
    "guided_json": "use response_format",
    "guided_regex": "use response_format",
    "guided_choice": "use response_format",
    "structured_outputs": "use response_format",
    "chat_template": "the policy has its own",
    "chat_template_kwargs": "set chat_template_kwargs of the task",
    "continue_final_message": "ask /v1/completions",
    "documents": "put them into the messages",
    "truncate_prompt_tokens": "shorten the messages",
    "logit_bias": "the logprobs would not be the policy's",
}


class OpenAIRequest(AgentRequest):
    refused = REFUSED
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    stop: Stop | Stops | None = None
    n: Literal[1] | None = None
    stream_options: Json | None = None
    response_format: ResponseFormat = None

    def answer(self, turn: SampledTurn, pieces: list[str]) -> Json:
        frame = self._frame(turn.name, self.kind)
        return {**frame, "choices": [self._choice(turn, pieces)], "usage": usage_of(turn)}

    def events(self, turn: SampledTurn, pieces: list[str]) -> Iterator[bytes]:
        wants_usage = (self.stream_options or {}).get("include_usage")
        frame = self._frame(turn.name, self.chunk_kind) | ({"usage": None} if wants_usage else {})
        chunks: list[Json] = [{"choices": [c]} for c in self._chunk_choices(turn, pieces)]
        if wants_usage:
            chunks.append({"choices": [], "usage": usage_of(turn)})
        return data_events(frame | chunk for chunk in chunks)

    def _frame(self, name: str, kind: str) -> Json:
        return {
            "id": f"{self.id_prefix}-{name}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    @abstractmethod
    def _choice(self, turn: SampledTurn, pieces: list[str]) -> Json: ...

    def _chunk_choices(self, turn: SampledTurn, pieces: list[str]) -> list[Json]:
        return [self._choice(turn, pieces)]


class ChatRequest(OpenAIRequest, ToolRequest):
    path = "/v1/chat/completions"
    history = "messages"
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    messages: Annotated[
        JsonList, Field(min_length=1), AfterValidator(lambda own: list(map(plain_message, own)))
    ]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None

    @staticmethod
    def plain(items: list[Any]) -> list[Json]:
        return [plain_message(item) for item in items]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def ask(self) -> Ask:
        return Ask(
            messages=self.messages,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stops=as_list(self.stop),
            structured=self.response_format,
            **self.of_tools(),
        )

    def _choice(self, turn: SampledTurn, pieces: list[str]) -> Json:
        return {
            "index": 0,
            "message": {**turn.message, "refusal": None},
            "finish_reason": turn.finish_reason,
            "logprobs": self._logprobs(turn, pieces),
        }

    def _chunk_choices(self, turn: SampledTurn, pieces: list[str]) -> list[Json]:
        delta = dict(turn.message)
        if turn.calls:
            delta["tool_calls"] = [{**call, "index": n} for n, call in enumerate(turn.calls)]
        logprobs = self._logprobs(turn, pieces)
        return [
            {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs},
            {"index": 0, "delta": {}, "finish_reason": turn.finish_reason, "logprobs": None},
        ]

    def _logprobs(self, turn: SampledTurn, pieces: list[str]) -> Json | None:
        if not self.logprobs:
            return None
        pairs = zip(pieces, turn.made.logprobs.tolist(), strict=True)
        content = [
            {"token": piece, "logprob": value, "bytes": None, "top_logprobs": []}
            for piece, value in pairs
        ]
        return {"content": content, "refusal": None}


class TextRequest(OpenAIRequest):
    path = "/v1/completions"
    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    prompt: Annotated[str, Field(min_length=1)] | Tokens
    max_tokens: MaxTokens | None = None
    logprobs: int | None = Field(None, ge=0)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError("one prompt at a time can be asked")
            return prompt[0]
        return prompt

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def ask(self) -> Ask:
        return Ask(
            prompt=self.prompt,
            max_tokens=self.max_tokens or 16,  # as OpenAI has it
            stops=as_list(self.stop),
            structured=self.response_format,
        )

    def _choice(self, turn: SampledTurn, pieces: list[str]) -> Json:
        logprobs = {
            "tokens": pieces,
            "token_logprobs": turn.made.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, pieces), initial=0))[:-1],
        }
        return {
            "index": 0,
            "text": turn.message["content"],
            "logprobs": logprobs if self.wants_logprobs else None,
            "finish_reason": turn.made.finish_reason,
        }


def usage_of(turn: SampledTurn) -> dict[str, int]:
    made = len(turn.made.token_ids)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": turn.prompt_tokens + made,
    }


def plain_message(message: Any) -> Json:
    """Return a message in one form, so that equal conversations compare equal.

    Unknown fields stay, since a chat template may read them. Raises ValueError for content that is
    not text.
    """
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    kept = {key: value for key, value in message.items() if value is not None}
    for name, instead in REFUSED_IN_MESSAGES.items():
        if kept.get(name):
            raise ValueError(f"{name}: {instead}")
    if not all(isinstance(kept.get(key, ""), str) for key in _TEXT_KEYS) or "role" not in kept:
        raise ValueError(f"a message has a role; {', '.join(_TEXT_KEYS)} are texts")
    calls = kept.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError("tool_calls is a list")
    if calls:
        kept["tool_calls"] = [_plain_call(call) for call in calls]
    text_of = result_text if kept["role"] == "tool" else joined_text
    kept["content"] = text_of(kept.get("content", ""))
    return kept


def _plain_call(call: Any) -> Json:
    """Return a call as this gateway writes it; agents add white space and fields."""
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            if isinstance(arguments, str):
                with suppress(ValueError):
                    arguments = read_json(arguments)
            if not isinstance(arguments, str):
                arguments = write_json(arguments)
            function = {"name": name, "arguments": arguments}
            if isinstance(call_id := call.get("id"), str | None):
                return {"id": call_id, "type": "function", "function": function}
    raise ValueError("tool_calls: each has an id, and a function with name and arguments")
