"""POST /v1/chat/completions: messages in, a message out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import orjson
from pydantic import Field, field_validator

from producer_workers.agent_loops.gateway.dialect import Json, Request, usage
from producer_workers.agent_loops.gateway.session import Session, Turn

_WORDS = ("role", "name", "tool_call_id")
_MESSAGE_KEYS = (*_WORDS, "tool_calls")


class ChatRequest(Request):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    @field_validator("messages")
    @classmethod
    def _plain(cls, messages: list[Json]) -> list[Json]:
        return [plain_message(message) for message in messages]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    async def ask(self, session: Session) -> Turn:
        tools = None if self.tool_choice == "none" else self.tools or None
        return await session.chat(self.messages, tools, self.wishes(self.max_completion_tokens or self.max_tokens))

    def answer(self, turn: Turn, name: str, pieces: list[str]) -> Json:
        choice = {
            "index": 0,
            "message": turn.message | {"refusal": None},
            "finish_reason": _finish(turn),
            "logprobs": self._logprobs(turn, pieces),
        }
        return self.frame(f"chatcmpl-{name}", "chat.completion") | {"choices": [choice], "usage": usage(turn)}

    def chunks(self, turn: Turn, name: str, pieces: list[str]) -> Iterator[Json]:
        frame = self.frame(f"chatcmpl-{name}", "chat.completion.chunk") | self.no_usage
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
    kept = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    if not all(isinstance(kept.get(key, ""), str) for key in _WORDS) or "role" not in kept:
        raise ValueError(f"a message has a role; {', '.join(_WORDS)} are texts")
    calls = kept.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError("tool_calls is a list")
    if calls:
        kept["tool_calls"] = [_plain_call(call) for call in calls]
    return kept | {"content": _plain_content(message.get("content"))}


def _plain_content(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return "".join(_text(part) for part in parts)


def _text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise ValueError("only text can be asked")


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
