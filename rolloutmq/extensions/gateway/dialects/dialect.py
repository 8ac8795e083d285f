"""The contract of a dialect, the form in which a kind of agent asks and is answered.

A request refuses fields that would make the logprobs untrue or change what the model reads, and
ignores unknown ones. The task sets temperature, top_p and thinking, because the trainer relies on
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import msgspec
import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from buffer.wire.sampling import StructuredOutput
from rolloutmq.extensions.gateway.turn import Ask, SampledTurn

Json = dict[str, Any]

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# The first fault of a list is enough: it may have millions.
TokenList = Annotated[list[Token], Field(fail_fast=True)]
Tokens = Annotated[TokenList, Field(min_length=1)]
JsonList = Annotated[list[Json], Field(fail_fast=True)]

ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def structure_of(form: Any) -> StructuredOutput | None:
    """Return a `response_format` as a structure, None for plain text. Raises ValueError."""
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutput(json_schema={"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} | {
            "type": "json_schema",
            "schema": dict(schema),
        }:
            return StructuredOutput(json_schema=schema)
    raise ValueError(
        'expected {"type": "text"}, {"type": "json_object"}, or json_schema with its schema'
    )


def _structure_in(holder: Any) -> StructuredOutput | None:
    if not isinstance(holder, dict | None):
        raise ValueError("expected an object with a format")
    return structure_of((holder or {}).get("format"))


ResponseFormat = Annotated[StructuredOutput | None, BeforeValidator(structure_of)]
FormatHolder = Annotated[StructuredOutput | None, BeforeValidator(_structure_in)]


def _choice_of(given: Any) -> str | bool | None:
    """Return a function that must be called by name; True for any, False if none may be."""
    match given:
        case None | "auto" | {"type": "auto"}:
            return None
        case "required" | {"type": "any"}:
            return True
        case "none" | {"type": "none"}:
            return False
        case (
            {"function": {"name": str(name)}}
            | {"type": "function", "name": str(name)}
            | {"type": "tool", "name": str(name)}
        ):
            return name
    raise ValueError("expected auto, none, a call of any function, or a function by its name")


ToolChoice = Annotated[str | bool | None, BeforeValidator(_choice_of)]


_MEDIA = ("image", "image_url", "input_image", "document", "input_file")


class Fields(BaseModel):
    """Fields of a request; those in `refused` must be null or empty, others are ignored."""

    model_config = ConfigDict(extra="ignore")
    refused: ClassVar[Mapping[str, str]] = {}  # with advice

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, fields: Any) -> Any:
        for name, advice in cls.refused.items() if isinstance(fields, dict) else ():
            if fields.get(name):
                raise ValueError(f"{name}: {advice}")
        return fields


class AgentRequest(Fields, ABC):
    """A request in one dialect, which is served at its `path`."""

    path: ClassVar[str]
    # It asks only how many tokens the model would read.
    counts: ClassVar[bool] = False
    # The field with the whole conversation, each message of which is read once; "": there is none.
    history: ClassVar[str] = ""

    model: str = ""
    stream: bool | None = None

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        self.ask()
        return self

    @staticmethod
    def parts(history: bytes) -> list[bytes]:
        """Return the items of `history` as JSON; those that make one message, between commas."""
        return list(map(bytes, ITEMS.decode(history)))

    @staticmethod
    def plain(items: list[Any]) -> list[Json]:
        """Return items of `history` as messages of chat completions. Raises ValueError."""
        raise NotImplementedError

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

    def waiting(self) -> bytes:
        """Return what a stream says while its turn is sampled: by default a comment."""
        return b": the turn is sampled\n\n"

    def failure(self, error: Json) -> bytes:
        """Return the event that ends a stream in place of a turn, from the body of a refusal."""
        return b"data: " + orjson.dumps(error) + b"\n\n"

    @staticmethod
    def error(status: int, message: str, code: str, field: str | None) -> Json:
        """Return the body of a refusal, as the dialect's clients parse it: by default OpenAI's."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "code": code, "param": field}}


class ToolRequest(AgentRequest):
    """A request that may offer functions, in the form of chat completions."""

    tools: JsonList | None = None
    tool_choice: ToolChoice = None

    def of_tools(self) -> Json:
        """Return the arguments of `Ask` for tools. Raises ValueError."""
        choice = self.tool_choice
        functions = [tool.get("function") for tool in self.tools or ()]
        names = [str(each.get("name", "")) for each in functions if isinstance(each, dict)]
        wanted = [name for name in names if name and choice in (name, True)]
        if choice not in (None, False) and not wanted:
            raise ValueError("tool_choice: the function that is to be called is not among tools")
        return {"tools": None if choice is False else self.tools or None, "call_one_of": wanted}


def as_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def data_events(contents: Iterable[Json]) -> Iterator[bytes]:
    """Yield server-sent events without names, and the one that ends them."""
    for content in contents:
        yield b"data: " + orjson.dumps(content) + b"\n\n"
    yield b"data: [DONE]\n\n"


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


def result_text(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return what a tool gave as text, which says where an image was. Raises ValueError.

    A refusal would end the session of every model that opens an image.
    """
    if isinstance(content, list):
        content = [_unseen(part, kinds[0]) for part in content]
    return joined_text(content, kinds)


def _unseen(part: Any, kind: str) -> Any:
    match part:
        case {"type": str(media)} if media in _MEDIA:
            return {"type": kind, "text": f"[{media}: this model reads text only]"}
    return part


def function_tool(name: Any, description: Any, parameters: Any) -> Json:
    """Return a tool in the form of chat completions, as chat templates write it."""
    if not (isinstance(name, str) and name and isinstance(parameters, dict)):
        raise ValueError("tools: each is a function with a name and the schema of its arguments")
    described = {"description": description} if description else {}
    function = {"name": name, **described, "parameters": parameters}
    return {"type": "function", "function": function}
