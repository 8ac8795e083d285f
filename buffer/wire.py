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

Columns are raw little-endian arrays, never lists of numbers. The prompt is stored once per group.
`decode` trusts nothing: size, nesting, types, lengths against each other, NaN and schema are checked, and the
error says what is wrong and where. Scripts never see these bytes (I14).
"""

from __future__ import annotations

import reprlib
from typing import Any, Literal

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buffer.errors import SchemaVersionError, WireError
from buffer.group import RolloutGroup
from buffer.rollout import MediaRef, SampleParams, Status, ToolCall
from buffer.wire_columns import Column, pack_columns, unpack_columns

SCHEMA = 1
MAX_BYTES = 256 * 2**20
"""A larger document is refused unread."""

MAX_CONTAINERS = 2**18
"""Maps and arrays in one document: an empty map is one byte on the wire and 64 in memory."""

MAX_ITEMS = 2**18
"""Declared length of one map or array: memory is set aside before the items are there."""

MAX_NESTING = 32
"""Deeper documents would end other readers' (and our own encoder's) recursion."""

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


class _Member(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    index: int = Field(ge=0)
    status: str
    sample: dict[str, Any] = {}
    response: str = ""
    reward: dict[str, float] | None = None
    finish_reason: str | None = None
    error: str | None = None
    spans: list[list[Any]] = []
    session_id: str | None = None
    tool_calls: list[ToolCall] = []
    routed_experts: Literal[True] | str | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    schema_: int = Field(alias="schema")
    gid: str = Field(max_length=128)
    task: str = Field(max_length=64)
    shared: _Shared
    members: list[_Member] = Field(min_length=1, max_length=4096)
    columns: dict[str, Column]


def encode(group: RolloutGroup) -> bytes:
    """The bytes of a group. O(bytes): columns are copied once, tokens are never looked at."""
    document = {
        "schema": SCHEMA,
        "gid": group.gid,
        "task": group.task,
        "shared": group.shared,
        "members": group.members,
        "columns": pack_columns(group),
    }
    try:
        packed: bytes = msgpack.packb(document)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"group {group.gid} holds something that msgpack cannot: {error}",
            hint="messages, ground_truth, extra and reward may hold text, numbers, lists and maps",
        ) from error
    return packed


def decode(data: bytes) -> RolloutGroup:
    """The group of these bytes; its columns are views of them.

    Raises:
        SchemaVersionError: written by another version.
        WireError: anything else that is not a whole, consistent group.
    """
    if len(data) > MAX_BYTES:
        raise WireError(f"document of {len(data)} bytes", hint=f"at most {MAX_BYTES}")
    document = _document(data)
    inline = [member.routed_experts is True for member in document.members]
    columns = unpack_columns(document.columns, inline)
    for place, member in enumerate(document.members):
        _check_member(place, member, int(columns["lengths"][place]))
    members = [m.model_dump(exclude_defaults=True) | {"index": m.index, "sample": m.sample} for m in document.members]
    return RolloutGroup.from_columns(document.gid, document.task, document.shared.fields(), members, columns)


def _document(data: bytes) -> _Document:
    try:
        raw = _unpack_document(data)
    except WireError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(f"not a msgpack document: {error} (it starts with {data[:16]!r})") from error
    if not isinstance(raw, dict):
        raise WireError(f"the document is a {type(raw).__name__}, not a map")
    _check_nesting(raw)
    if raw.get("schema") != SCHEMA:
        raise SchemaVersionError(f"schema {reprlib.repr(raw.get('schema'))}; this version reads {SCHEMA}")
    try:
        return _Document.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WireError(f"at {place}: {first['msg']}") from error


def _unpack_document(data: bytes) -> Any:
    left = MAX_CONTAINERS

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError("too many maps and arrays in one document", hint=f"at most {MAX_CONTAINERS}")
        return container

    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=True,
        object_hook=count,
        list_hook=count,
        ext_hook=_no_extensions,
        max_array_len=MAX_ITEMS,
        max_map_len=MAX_ITEMS,
        max_ext_len=0,
    )


def _check_nesting(document: dict[str, Any]) -> None:
    level: list[Any] = [document]
    for _ in range(MAX_NESTING):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise WireError("maps and arrays are nested too deeply", hint=f"at most {MAX_NESTING} levels")


def _no_extensions(code: int, _: bytes) -> Any:
    raise WireError(f"msgpack extension type {code}", hint="the format uses none")


def _check_member(place: int, member: _Member, tokens: int) -> None:
    where = f"at members.{place}"
    if member.status not in set(Status):
        raise WireError(f"{where}.status: {member.status[:32]!r} is none of {[str(s) for s in Status]}")
    if member.reward is not None and not np.isfinite(list(member.reward.values())).all():
        raise WireError(f"{where}.reward: NaN or infinite")
    for span in member.spans:
        if [type(part) for part in span] != [int, int, int, str]:
            raise WireError(f"{where}.spans: {reprlib.repr(span)} is not [start, length, version, lineage]")
        if span[0] < 0 or span[1] < 0 or span[0] + span[1] > tokens:
            raise WireError(f"{where}.spans: {reprlib.repr(span)} lies outside of {tokens} tokens")
        if not 0 <= span[2] < 2**53:
            raise WireError(f"{where}.spans: {span[2]} is no policy version")
    try:
        SampleParams(**member.sample)
    except (ValidationError, TypeError) as error:
        raise WireError(f"{where}.sample: {str(error)[:500]}") from error
