"""From bytes to a plain document: nothing is believed yet but that it is msgpack of bounded size.

What `wire.encode` writes is read without copying its columns, which are the last entry and nearly
all of the bytes. Whatever looks otherwise is read as a whole by the library. The answer is the
same, and so are the errors: only the second reader raises any.

The wire format: one msgpack document per group, readable by any msgpack library in any language.

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

The document may be stored in one zstd frame (magic 28 B5 2F FD, content size in its header, no
dictionary): any writer may do so, every reader must look; checksum and size of a payload are those
of the stored bytes.

Columns are raw little-endian arrays, never lists of numbers. The prompt is stored once per group.
`decode` trusts nothing: size, nesting, types, lengths against each other, NaN and schema are
checked, and the error says what is wrong and where. Scripts never see these bytes (I14).
"""

from __future__ import annotations

import reprlib
from typing import Any

import msgpack

from buffer.errors import SchemaVersionError, WireError
from buffer.model.compression import MAX_BYTES, expand
from buffer.model.group import Member, RolloutGroup
from buffer.model.wire_columns import (
    Columns,
    check_columns,
    columns_of,
    pack_columns,
    read_own_columns,
    unpack_columns,
)
from buffer.model.wire_schema import check_schema

MAX_CONTAINERS = 2**18
"""Maps and arrays in one document: an empty map is one byte on the wire and 64 in memory."""

MAX_ITEMS = 2**18
"""Declared length of one map or array: memory is set aside before the items are there."""

MAX_NESTING = 32
"""Deeper documents would end other readers' (and our own encoder's) recursion."""

_OWN_ENTRIES = ("schema", "gid", "task", "shared", "members", "columns")
_FIRST_BYTES = 32 * 2**10
"""What is given to the library at first: all but the columns, where texts are short."""


def read_document(data: bytes | memoryview) -> dict[str, Any]:
    """The document as the library gives it, its columns perhaps as views of `data`. Raises
    WireError.
    """
    if len(data) > MAX_BYTES:
        raise WireError(f"document of {len(data)} bytes", hint=f"at most {MAX_BYTES}")
    document = _read_own(memoryview(data)) or _read_any(data)
    if not isinstance(document, dict):
        raise WireError(f"the document is a {type(document).__name__}, not a map")
    return document


def check_nesting(value: Any) -> None:
    """Raise WireError where maps and arrays lie too deep in each other. For what no schema
    describes.
    """
    level: list[Any] = [[value]]
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


def _read_any(data: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(data, **_LIMITS, **_counting())
    except WireError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(
            f"not a msgpack document: {error} (it starts with {bytes(data[:16])!r})"
        ) from error


def _read_own(data: memoryview) -> dict[str, Any] | None:
    """None where the document is not one of `wire.encode`."""
    try:
        try:
            document, place = _read_head(data[:_FIRST_BYTES])
        except msgpack.OutOfData:
            document, place = _read_head(data[:MAX_CONTAINERS])
        document["columns"] = read_own_columns(data, place)
    except (
        ValueError,
        TypeError,
        IndexError,
        msgpack.exceptions.UnpackException,
        RecursionError,
        WireError,
    ):
        return None
    return document if tuple(document) == _OWN_ENTRIES and document["columns"] is not None else None


def _read_head(data: memoryview) -> tuple[dict[str, Any], int]:
    """All entries but the last one, the name of that, and where its value begins.

    Containers need no count: there cannot be more of them than bytes, and it is given no more than
    MAX_CONTAINERS.
    """
    unpacker = msgpack.Unpacker(read_size=len(data), **_LIMITS)
    unpacker.feed(data)
    if unpacker.read_map_header() != len(_OWN_ENTRIES):
        raise ValueError
    read = unpacker.unpack
    return {read(): read() for _ in _OWN_ENTRIES[1:]} | {read(): None}, unpacker.tell()


def _counting() -> dict[str, Any]:
    left = MAX_CONTAINERS

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError(
                "too many maps and arrays in one document", hint=f"at most {MAX_CONTAINERS}"
            )
        return container

    return {"object_hook": count, "list_hook": count}


def _no_extensions(code: int, _: bytes) -> Any:
    raise WireError(f"msgpack extension type {code}", hint="the format uses none")


_LIMITS: dict[str, Any] = {
    "raw": False,
    "strict_map_key": True,
    "ext_hook": _no_extensions,
    "max_array_len": MAX_ITEMS,
    "max_map_len": MAX_ITEMS,
    "max_ext_len": 0,
}

SCHEMA = 1


def encode(group: RolloutGroup) -> bytes:
    """The bytes of a group. O(bytes): columns are copied once, tokens are never looked at."""
    entries = {
        "schema": SCHEMA,
        "gid": group.gid,
        "task": group.task,
        "shared": group.shared,
        "members": group.members,
    }
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
    """`encode`, for bytes that others must be able to read: raises what `decode` would raise for
    them.
    """
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
    columns = unpack_columns(document["columns"])
    members = document["members"]
    _check_members(members, columns)
    shared = {"messages": [], "data_source": None, "ground_truth": None, "extra": {}} | document[
        "shared"
    ]
    return RolloutGroup.from_columns(document["gid"], document["task"], shared, members, columns)


def _check_types(document: dict[str, Any]) -> None:
    if document.get("schema") != SCHEMA:
        raise SchemaVersionError(
            f"schema {reprlib.repr(document.get('schema'))}; this version reads {SCHEMA}"
        )
    check_schema(document)
    check_nesting(document["shared"])


def _check_members(members: list[Member], columns: Columns) -> None:
    """What no schema says: columns and members against each other; adds a mask to columns without
    one.
    """
    check_columns(columns, [member.get("routed_experts") is True for member in members])
    for place, (member, tokens) in enumerate(
        zip(members, columns["lengths"].tolist(), strict=True)
    ):
        for span in member.get("spans", ()):
            if span[0] + span[1] > tokens:
                raise WireError(
                    f"at members.{place}.spans: {reprlib.repr(span)} lies outside of {tokens} tokens"
                )
        check_nesting(member["sample"].get("structured"))
        if calls := member.get("tool_calls"):
            check_nesting([call.get("arguments") for call in calls])
        if member.get("routed_experts") is False:
            raise WireError(f"at members.{place}.routed_experts: false", hint="leave it out")
