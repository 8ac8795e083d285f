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
from typing import Any

import msgpack

from buffer.compression import expand
from buffer.errors import SchemaVersionError, WireError
from buffer.group import Member, RolloutGroup
from buffer.wire_columns import Columns, check_columns, columns_of, pack_columns, unpack_columns
from buffer.wire_reader import check_nesting, read_document
from buffer.wire_schema import check_schema

SCHEMA = 1


def encode(group: RolloutGroup) -> bytes:
    """The bytes of a group. O(bytes): columns are copied once, tokens are never looked at."""
    entries = {"schema": SCHEMA, "gid": group.gid, "task": group.task, "shared": group.shared, "members": group.members}
    try:
        # its last byte is the None, in whose place the columns come
        head = memoryview(msgpack.packb(entries | {"columns": None}))[:-1]
        return b"".join([head, *pack_columns(columns_of(group))])
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"group {group.gid} holds something that msgpack cannot: {error}",
            hint="messages, ground_truth, extra and reward may hold text, numbers, lists and maps",
        ) from error


def encode_checked(group: RolloutGroup) -> bytes:
    """`encode`, for bytes that others must be able to read: raises what `decode` would raise for them."""
    data = encode(group)
    decode(data)  # only the bytes can tell: a tuple, say, has become a list
    return data


def decode(data: bytes | memoryview) -> RolloutGroup:
    """The group of these bytes; its columns are views of them, or of what they expand to.

    Raises:
        SchemaVersionError: written by another version.
        WireError: anything else that is not a whole, consistent group.
    """
    document = read_document(expand(data))
    _check_types(document)
    columns, members = unpack_columns(document["columns"]), document["members"]
    _check_members(members, columns)
    shared = {"messages": [], "data_source": None, "ground_truth": None, "extra": {}} | document["shared"]
    return RolloutGroup.from_columns(document["gid"], document["task"], shared, members, columns)


def _check_types(document: dict[str, Any]) -> None:
    if document.get("schema") != SCHEMA:
        raise SchemaVersionError(f"schema {reprlib.repr(document.get('schema'))}; this version reads {SCHEMA}")
    check_schema(document)
    check_nesting(document["shared"])


def _check_members(members: list[Member], columns: Columns) -> None:
    """What no schema says: columns and members against each other; adds a mask to columns without one."""
    check_columns(columns, [member.get("routed_experts") is True for member in members])
    for place, (member, tokens) in enumerate(zip(members, columns["lengths"].tolist(), strict=True)):
        for span in member.get("spans", ()):
            if span[0] + span[1] > tokens:
                raise WireError(f"at members.{place}.spans: {reprlib.repr(span)} lies outside of {tokens} tokens")
        check_nesting(member["sample"].get("structured"))
        if calls := member.get("tool_calls"):
            check_nesting([call.get("arguments") for call in calls])
        if member.get("routed_experts") is False:
            raise WireError(f"at members.{place}.routed_experts: false", hint="leave it out")
