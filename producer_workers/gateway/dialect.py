"""The contract of a dialect, the form in which a kind of agent asks and is answered.

A request refuses fields that would make the logprobs untrue or change what the model reads, and
ignores unknown ones. The task sets temperature, top_p and thinking, because the trainer relies on
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from buffer.wire.sampling import StructuredOutput
from producer_workers.gateway.turn import Ask, SampledTurn

Json = dict[str, Any]

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# The first fault of a list is enough: it may have millions.
TokenList = Annotated[list[Token], Field(fail_fast=True)]
Tokens = Annotated[TokenList, Field(min_length=1)]
JsonList = Annotated[list[Json], Field(fail_fast=True)]


class AgentRequest(BaseModel, ABC):
    """A request in one dialect, which is served at its `path`."""

    model_config = ConfigDict(extra="ignore")
    path: ClassVar[str]
    # Fields that are refused unless they are null or empty, with advice.
    refused: ClassVar[Mapping[str, str]] = {}
    # It asks only how many tokens the model would read.
    counts: ClassVar[bool] = False

    model: str = ""
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, fields: Any) -> Any:
        refuse(fields, cls.refused)
        return fields

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        self.ask()
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the answer needs the texts of the tokens."""
        return False

    @abstractmethod
    def ask(self) -> Ask:
        """Return what is asked. Raises ValueError."""

    @abstractmethod
    def answer(self, turn: SampledTurn, pieces: list[str]) -> Json:
        """Return the response; `pieces` are the texts of its tokens, for logprobs."""

    @abstractmethod
    def events(self, turn: SampledTurn, pieces: list[str]) -> Iterator[bytes]:
        """Yield the response as server-sent events, all at once: the turn is complete."""

    @staticmethod
    def error(status: int, message: str, code: str, field: str | None) -> Json:
        """Return the body of a refusal, as the dialect's clients parse it: by default OpenAI's."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "code": code, "param": field}}


def refuse(fields: Any, refused: Mapping[str, str]) -> None:
    """Raise ValueError with advice if a map has one of the `refused` fields."""
    for name in refused if isinstance(fields, dict) else ():
        if fields.get(name):
            raise ValueError(f"{name}: {refused[name]}")


def as_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def event(content: Json) -> bytes:
    """Return a named server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), orjson.dumps(content))


def joined_text(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return a text, or the joined texts of parts of `kinds`. Raises ValueError."""
    texts = []
    for part in content if isinstance(content, list) else [{"type": kinds[0], "text": content}]:
        match part:
            case {"type": kind, "text": str(text)} if kind in kinds:
                texts.append(text)
            case _:
                raise ValueError("only text can be asked")
    return "".join(texts)


def function_tool(name: Any, description: Any, parameters: Any) -> Json:
    """Return a tool in the form of chat completions, as chat templates write it."""
    if not (isinstance(name, str) and name and isinstance(parameters, dict)):
        raise ValueError("tools: each is a function with a name and the schema of its arguments")
    described = {"description": description} if description else {}
    function = {"name": name, **described, "parameters": parameters}
    return {"type": "function", "function": function}


def as_json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # an integer over 64 bits, or too deep
        raise ValueError(f"arguments: {error}") from error


def json_schema(schema: Any) -> StructuredOutput:
    if not isinstance(schema, dict):
        raise ValueError("expected json_schema with its schema")
    return StructuredOutput(json_schema=schema)


def must_call(tools: Sequence[Json] | None, choice: str | bool | None) -> list[str]:
    """Return the functions of which one must be called: `choice` by name, True for any.

    Raises ValueError if that is not offered.
    """
    names = [name for name in map(name_of, tools or ()) if name and choice in (name, True)]
    if choice is not None and not names:
        raise ValueError("tool_choice: the function that is to be called is not among tools")
    return names


def name_of(tool: Json) -> str:
    """Return the function's name in a tool or a tool choice of chat completions; "" without one."""
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else ""
