"""What requests and answers of OpenAI's two ways to ask have in common, as far as a policy under training can speak it.

What would make the recorded logprobs untrue is refused (several choices, forced tools, formats, biases); temperature
and top_p are those of the task, whatever a request says, since the trainer counts on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from producer_workers.agent_loops.gateway.session import Session, Turn

Json = dict[str, Any]


class Asked(Protocol):
    """A request that was understood."""

    stream: bool

    @property
    def wants_logprobs(self) -> bool: ...

    async def ask(self, session: Session) -> Turn:
        """Put it to the model. Raises what `Session` raises."""
        ...

    def answer(self, turn: Turn, name: str, pieces: list[str]) -> Json:
        """The response, `name` its id. `pieces`: the text of each token, where logprobs are wanted."""
        ...

    def chunks(self, turn: Turn, name: str, pieces: list[str]) -> Iterator[Json]:
        """The same as a stream. The turn is whole when it begins: its tokens come in one chunk."""
        ...


class Request(BaseModel):
    """What of any request matters here; other fields are not looked at."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    stream: bool = False
    stream_options: Json | None = None
    logit_bias: None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def frame(self, name: str, kind: str) -> Json:
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream."""
        return bool((self.stream_options or {}).get("include_usage"))


def usage(turn: Turn) -> dict[str, int]:
    made = len(turn.made.token_ids)
    return {"prompt_tokens": turn.prompt_tokens, "completion_tokens": made, "total_tokens": turn.prompt_tokens + made}


def refusal(message: str, code: str, kind: str = "invalid_request_error") -> Json:
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
