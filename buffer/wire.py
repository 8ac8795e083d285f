"""The wire format: one msgpack document per group, readable by any msgpack library in any language.

    {"schema": 1, "gid": str, "task": str,
     "shared": {"messages": [...], "data_source": str?, "ground_truth": any, "extra": {...},
                "tools": [...]?, "tool_choice": str or {...}?,
                "multimodal": [{"kind": str, "uri": str, "tokens": int?, "grid_thw": [int, int, int]?}, ...]?},
     "members": [{"index": int, "status": str, "sample": {...}, "response": str?, "reward": {str: float}?,
                  "finish_reason": str?, "error": str?, "spans": [[start, length, version, lineage], ...]?,
                  "session_id": str?, "routed_experts": True (in the column) or str (where they are)?,
                  "tool_calls": [{"id": str, "name": str, "arguments": {...}?, "raw_arguments": str?}, ...]?}, ...],
     "columns": {"prompt_ids": {"dtype": "<i4", "data": bin}, "lengths": …, "response_ids": …, "logprobs": …,
                 "mask": … (only where some token is not trained), "ref_logprobs": …?, "values": …? (NaN for all
                 tokens of a member without), "routed_experts": {…, "shape": [rows, layers, top_k]}?}}

The document may be stored in one zstd frame (magic 28 B5 2F FD, content size in its header, no dictionary): any writer
may do so, every reader must look; checksum and size of a payload are those of the stored bytes.

Columns are raw little-endian arrays, never lists of numbers. The prompt is stored once per group.
`decode` trusts nothing: size, nesting, types, lengths against each other, NaN and schema are checked, and the
error says what is wrong and where. Scripts never see these bytes (I14).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Required

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from buffer.compression import expand
from buffer.errors import SchemaVersionError, WireError
from buffer.group import RolloutGroup
from buffer.rollout import MediaRef, SampleParams, ToolCall
from buffer.wire_columns import Column, Columns, check_columns, columns_of, pack_columns, unpack_columns
from buffer.wire_reader import MAX_CONTAINERS, check_nesting, read_document

SCHEMA = 1


class _Shared(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    messages: list[dict[str, Any]] = []
    data_source: str | None = None
    ground_truth: Any = None
    extra: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    multimodal: list[MediaRef] = []

    def fields(self) -> dict[str, Any]:
        """As `RolloutGroup` keeps them: optional ones only where they are there."""
        always = ("messages", "data_source", "ground_truth", "extra")
        fields: dict[str, Any] = {name: getattr(self, name) for name in always}
        return fields | self.model_dump(include={"tools", "tool_choice", "multimodal"}, exclude_defaults=True)


class _Member(TypedDict, total=False):
    # a map and no model: a trainer reads thousands, and wants to keep them as maps
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    index: Required[Annotated[int, Field(ge=0)]]
    status: Required[Literal["init", "completed", "aborted", "expired", "failed", "filtered", "archived"]]
    sample: Required[dict[str, Any]]
    response: str
    reward: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None
    finish_reason: str | None
    error: str | None
    spans: list[list[Any]]
    session_id: str | None
    tool_calls: list[ToolCall]
    routed_experts: Literal[True] | str | None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    schema_: int = Field(alias="schema")
    gid: str = Field(max_length=128)
    task: str = Field(max_length=64)
    shared: _Shared
    members: list[_Member] = Field(min_length=1, max_length=4096)
    columns: dict[str, Column]


_SAMPLES = TypeAdapter(list[SampleParams])


def encode(group: RolloutGroup) -> bytes:
    """The bytes of a group. O(bytes): columns are copied once, tokens are never looked at."""
    try:
        # its last byte is the None, in whose place the columns come
        head = memoryview(msgpack.packb(_entries(group) | {"columns": None}))[:-1]
        return b"".join([head, *pack_columns(columns_of(group))])
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"group {group.gid} holds something that msgpack cannot: {error}",
            hint="messages, ground_truth, extra and reward may hold text, numbers, lists and maps",
        ) from error


def encode_checked(group: RolloutGroup) -> bytes:
    """`encode`, for bytes that others must be able to read: raises what `decode` would raise for them."""
    data, columns = encode(group), columns_of(group)
    # what no schema bounds is bounded by the bytes there are for it
    is_small = len(data) - sum(column.nbytes for column in columns.values()) <= MAX_CONTAINERS
    try:
        _check(_validated(_entries(group) | {"columns": {}}), columns)
    except WireError:
        is_small = False  # a list for a tuple, say: only the bytes themselves can tell
    if not is_small:
        decode(data)
    return data


def decode(data: bytes | memoryview) -> RolloutGroup:
    """The group of these bytes; its columns are views of them, or of what they expand to.

    Raises:
        SchemaVersionError: written by another version.
        WireError: anything else that is not a whole, consistent group.
    """
    document = _validated(read_document(expand(data)))
    columns = unpack_columns(document.columns)
    _check(document, columns)
    members = [_plain(member) for member in document.members]
    return RolloutGroup.from_columns(document.gid, document.task, document.shared.fields(), members, columns)


def _entries(group: RolloutGroup) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "gid": group.gid,
        "task": group.task,
        "shared": group.shared,
        "members": group.members,
    }


def _validated(raw: dict[str, Any]) -> _Document:
    if raw.get("schema") != SCHEMA:
        raise SchemaVersionError(f"schema {reprlib.repr(raw.get('schema'))}; this version reads {SCHEMA}")
    check_nesting(raw.get("shared"))
    try:
        return _Document.model_validate(raw)
    except ValidationError as error:
        raise WireError(_told(error)) from error


def _check(document: _Document, columns: Columns) -> None:
    """What no schema says: columns and members against each other; adds a mask to columns without one."""
    members = document.members
    check_columns(columns, [member.get("routed_experts") is True for member in members])
    for place, (member, tokens) in enumerate(zip(members, columns["lengths"].tolist(), strict=True)):
        if spans := member.get("spans"):
            _check_spans(f"at members.{place}", spans, tokens)
        if calls := member.get("tool_calls"):
            check_nesting([call.arguments for call in calls])
    _check_samples([member["sample"] for member in members])


def _told(error: ValidationError, *place: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"at {'.'.join([*place, *(str(part) for part in first['loc'])])}: {first['msg']}"


def _check_spans(where: str, spans: Iterable[Sequence[Any]], tokens: int) -> None:
    for span in spans:
        if [type(part) for part in span] != [int, int, int, str]:
            raise WireError(f"{where}.spans: {reprlib.repr(span)} is not [start, length, version, lineage]")
        start, length, version, _ = span
        if start < 0 or length < 0 or start + length > tokens:
            raise WireError(f"{where}.spans: {reprlib.repr(span)} lies outside of {tokens} tokens")
        if not 0 <= version < 2**53:
            raise WireError(f"{where}.spans: {version} is no policy version")


def _check_samples(samples: list[dict[str, Any]]) -> None:
    try:
        _SAMPLES.validate_python(samples)
    except ValidationError as error:
        place, *_ = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise WireError(f"at members.{place}.sample: {_told(error)}") from error


def _plain(member: _Member) -> dict[str, Any]:
    plain: dict[str, Any] = dict(member)
    if calls := member.get("tool_calls"):
        plain["tool_calls"] = [call.model_dump(exclude_defaults=True) for call in calls]
    return plain
