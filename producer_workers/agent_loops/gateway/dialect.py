"""The chat completions API as far as a policy under training can speak it: requests in, answers and chunks out.

What would make the recorded logprobs untrue is refused (several choices, forced tools, formats, biases); temperature
and top_p are those of the task, whatever a request says, since the trainer counts on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from producer_workers.agent_loops.gateway.session import Turn

_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_FINISH = {"stop": "stop", "length": "length"}


class ChatRequest(BaseModel):
    """What of a request matters here; other fields are not looked at."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    response_format: None = None
    logit_bias: None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        return None if value == {"type": "text"} else value

    @field_validator("messages")
    @classmethod
    def _plain(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [plain_message(message) for message in messages]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """What a message says, in one form: the same conversation shall compare equal. ValueError for anything but text."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ValueError("only text can be asked")
        content = "".join(str(part.get("text", "")) for part in content)
    kept = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    return kept | {"content": content or ""}


def answer(request: ChatRequest, turn: Turn, name: str, pieces: list[str]) -> dict[str, Any]:
    """The response of one request that does not stream. `pieces`: the text of each token."""
    choice = {
        "index": 0,
        "message": turn.message | {"refusal": None},
        "finish_reason": _finish(turn),
        "logprobs": _logprobs(turn, pieces) if request.logprobs else None,
    }
    return _frame(request, name, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def chunks(request: ChatRequest, turn: Turn, name: str, pieces: list[str]) -> Iterator[dict[str, Any]]:
    """The same as a stream. The turn is whole when it begins: its tokens come in one chunk."""
    frame = _frame(request, name, "chat.completion.chunk")
    calls = [call | {"index": place} for place, call in enumerate(turn.message.get("tool_calls", ()))]
    delta = turn.message | ({"tool_calls": calls} if calls else {})
    logprobs = _logprobs(turn, pieces) if request.logprobs else None
    yield frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]}
    yield frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(turn), "logprobs": None}]}
    if (request.stream_options or {}).get("include_usage"):
        yield frame | {"choices": [], "usage": _usage(turn)}


def refusal(message: str, code: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _frame(request: ChatRequest, name: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": request.model}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.message.get("tool_calls") else _FINISH[turn.made.finish_reason]


def _usage(turn: Turn) -> dict[str, int]:
    made = len(turn.made.token_ids)
    return {"prompt_tokens": turn.prompt_tokens, "completion_tokens": made, "total_tokens": turn.prompt_tokens + made}


def _logprobs(turn: Turn, pieces: list[str]) -> dict[str, Any]:
    pairs = zip(pieces, turn.made.logprobs.tolist(), strict=True)
    content = [{"token": piece, "logprob": value, "bytes": None, "top_logprobs": []} for piece, value in pairs]
    return {"content": content, "refusal": None}
