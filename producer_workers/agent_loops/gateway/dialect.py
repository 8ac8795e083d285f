"""What requests and answers of OpenAI's two ways to ask have in common, as far as a policy under training can speak it.

What would make the recorded logprobs untrue (several choices, forced tools, biases), or what the model reads other than
asked, is refused; temperature and top_p are those of the task, whatever a request says, since the trainer counts on
them. Fields that are not known are not looked at, as servers have fields of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from buffer.structured_output import StructuredOutput
from producer_workers.agent_loops.gateway.session import Session, Turn
from producer_workers.agent_loops.gateway.wishes import Wishes, structure_of

Json = dict[str, Any]

Stop = Annotated[str, Field(min_length=1, max_length=1024)]

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
    "chat_template_kwargs": "the policy's template is used as it is",
    "continue_final_message": "ask /v1/completions",
    "logit_bias": "the logprobs would not be the policy's",
}
"""Fields that would change what is read or sampled, and what to do instead; null and empty ones mean nothing."""


class Asked(Protocol):
    """A request that was understood."""

    @property
    def wants_stream(self) -> bool: ...

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
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    response_format: Annotated[StructuredOutput | None, BeforeValidator(structure_of)] = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, fields: Any) -> Any:
        for name in REFUSED if isinstance(fields, dict) else ():
            if fields.get(name):
                raise ValueError(f"{name}: {REFUSED[name]}")
        return fields

    def wishes(self, max_tokens: int | None) -> Wishes:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Wishes(max_tokens, stops, self.response_format)

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    def frame(self, name: str, kind: str) -> Json:
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def no_usage(self) -> Json:
        """What says so in every chunk but the last, where it is wanted."""
        return {"usage": None} if self.wants_usage else {}


def usage(turn: Turn) -> dict[str, int]:
    made = len(turn.made.token_ids)
    return {"prompt_tokens": turn.prompt_tokens, "completion_tokens": made, "total_tokens": turn.prompt_tokens + made}


def refusal(message: str, code: str, kind: str = "invalid_request_error", field: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "code": code, "param": field}}
