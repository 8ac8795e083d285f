"""The types of a document of the wire format, against which `msgspec` checks it.

The document itself is kept as it is. pydantic takes six times as long for the same check (measured:
36 us and 6 us for eight rollouts), and most of the cost of a batch is decoding.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from buffer.errors import WireError

_LARGEST = 3.4028234663852886e38
"""Trainers read scores as float32, in which larger ones are infinite."""
Score = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
Count = Annotated[int, Meta(ge=0)]
Version = Annotated[int, Meta(ge=0, lt=2**53)]


class _Map(Struct, forbid_unknown_fields=True, gc=False):
    """A map without unknown keys, which the garbage collector need not track."""


class Structure(_Map):
    """The form of a response (`StructuredOutput`)."""

    json_schema: dict[str, Any] | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.json_schema, self.regex, self.choice)) != 1:
            raise ValueError("structured output is one of json_schema, regex and choice")


class Sample(_Map):
    """How a response is sampled (`SampleParams`)."""

    temperature: Annotated[float, Meta(ge=0)] = 1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1
    top_k: Count = 0
    max_tokens: Annotated[int, Meta(ge=1)] = 1
    min_tokens: Count = 0
    stops: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1
    presence_penalty: float = 0
    frequency_penalty: float = 0
    structured: Structure | None = None


class Call(_Map):
    """A function call (`ToolCall`)."""

    id: str
    name: str
    arguments: dict[str, Any] | None = None
    raw_arguments: str = ""


class Media(_Map):
    """An image of the prompt (`MediaRef`)."""

    kind: Literal["image", "video", "audio"]
    uri: Annotated[str, Meta(min_length=1)]
    tokens: Count = 0
    grid_thw: (
        Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=3, max_length=3)] | None
    ) = None


class Shared(_Map):
    """What all rollouts of a prompt share."""

    messages: list[dict[str, Any]] = []
    data_source: str | None = None
    ground_truth: Any = None
    extra: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    multimodal: list[Media] = []


class Member(_Map):
    """What a rollout has besides its token columns."""

    index: Count
    status: Literal["init", "completed", "aborted", "expired", "failed", "filtered", "archived"]
    sample: Sample
    response: str = ""
    reward: dict[str, Score] | None = None
    finish_reason: str | None = None
    error: str | None = None
    spans: list[tuple[Count, Count, Version, str]] = []
    session_id: str = ""
    tool_calls: list[Call] = []
    routed_experts: bool | str | None = None


class Column(_Map):
    """One array; only `routed_experts` has a shape."""

    dtype: str
    data: memoryview
    shape: list[int] | None = None


class Columns(_Map):
    """All arrays of a group, whose contents `buffer.model.wire_columns` checks."""

    prompt_ids: Column
    lengths: Column
    response_ids: Column
    logprobs: Column
    mask: Column | UnsetType = UNSET
    ref_logprobs: Column | UnsetType = UNSET
    values: Column | UnsetType = UNSET
    routed_experts: Column | UnsetType = UNSET


MAX_MEMBERS = 4096
"""Rollouts of one group; the scripts accept no more."""


class Document(_Map):
    """A whole group."""

    schema: int
    gid: Annotated[str, Meta(max_length=128)]
    task: Annotated[str, Meta(max_length=64)]
    shared: Shared
    members: Annotated[list[Member], Meta(min_length=1, max_length=MAX_MEMBERS)]
    columns: Columns


def check_schema(document: dict[str, Any]) -> None:
    """Raise WireError for the first value that is missing, unknown or of another type."""
    try:
        msgspec.convert(document, Document, builtin_types=(bytes, memoryview))
    except msgspec.ValidationError as error:
        raise WireError(_describe(error)) from error


def _describe(error: msgspec.ValidationError) -> str:
    """Return "at where: what" for msgspec's "what - at `$.members[0].index`"."""
    found = re.fullmatch(r"(.*?)(?: - at `\$\.(.*)`)?", str(error), re.DOTALL)
    what, where = found.groups() if found else (str(error), "")
    dotted = re.sub(r"\[(\d+)\]", r".\1", where or "the top").replace("[...]", "")
    return f"at {dotted[:200]}: {what[:200]}"


# msgspec (0.22) analyses these types at their first use and crashes when two threads do so at once;
# during an import there is only one thread
with contextlib.suppress(WireError):
    check_schema({})
