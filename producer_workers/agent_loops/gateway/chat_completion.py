"""POST /v1/chat/completions: messages in, a message out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import orjson
from pydantic import Field, field_validator

from producer_workers.agent_loops.gateway.dialect import Json, Request, usage
from producer_workers.agent_loops.gateway.session import Session, Turn

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class ChatRequest(Request):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    response_format: None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        return None if value == {"type": "text"} else value

    @field_validator("messages")
    @classmethod
    def _plain(cls, messages: list[Json]) -> list[Json]:
        return [plain_message(message) for message in messages]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    async def ask(self, session: Session) -> Turn:
        tools = None if self.tool_choice == "none" else self.tools
        return await session.chat(self.messages, tools, self.max_completion_tokens or self.max_tokens, self.stops)

    def answer(self, turn: Turn, name: str, pieces: list[str]) -> Json:
        choice = {
            "index": 0,
            "message": turn.message | {"refusal": None},
            "finish_reason": _finish(turn),
            "logprobs": self._logprobs(turn, pieces),
        }
        return self.frame(f"chatcmpl-{name}", "chat.completion") | {"choices": [choice], "usage": usage(turn)}

    def chunks(self, turn: Turn, name: str, pieces: list[str]) -> Iterator[Json]:
        frame = self.frame(f"chatcmpl-{name}", "chat.completion.chunk")
        calls = [call | {"index": place} for place, call in enumerate(turn.message.get("tool_calls", ()))]
        delta = turn.message | ({"tool_calls": calls} if calls else {})
        logprobs = self._logprobs(turn, pieces)
        yield frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]}
        yield frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(turn), "logprobs": None}]}
        if self.wants_usage:
            yield frame | {"choices": [], "usage": usage(turn)}

    def _logprobs(self, turn: Turn, pieces: list[str]) -> Json | None:
        if not self.logprobs:
            return None
        pairs = zip(pieces, turn.made.logprobs.tolist(), strict=True)
        content = [{"token": piece, "logprob": value, "bytes": None, "top_logprobs": []} for piece, value in pairs]
        return {"content": content, "refusal": None}


def plain_message(message: Json) -> Json:
    """What a message says, in one form: the same conversation shall compare equal. ValueError for anything but text."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError("only text can be asked")
        content = "".join(str(part.get("text", "")) for part in content)
    kept = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_plain_call(call) for call in kept["tool_calls"]]
    return kept | {"content": content or ""}


def _plain_call(call: Any) -> Json:
    """A call as this gateway writes it: agents send it back with other spaces, or with fields of their own."""
    try:
        function = {"name": str(call["function"]["name"]), "arguments": call["function"]["arguments"]}
    except (KeyError, TypeError) as error:
        raise ValueError("tool_calls: each has an id, and a function with name and arguments") from error
    if isinstance(function["arguments"], str):
        with suppress(orjson.JSONDecodeError):
            function["arguments"] = orjson.loads(function["arguments"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = orjson.dumps(function["arguments"]).decode()
    return {"id": call.get("id"), "type": "function", "function": function}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.message.get("tool_calls") else turn.made.finish_reason
