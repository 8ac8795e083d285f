"""The wire format: one msgpack document per group, readable by any msgpack library.

    {"schema": 1, "gid": str, "task": str,
     "shared": {"messages": [...], "data_source": str?, "ground_truth": any, "extra": {...},
                "tools": [...]?, "tool_choice": str or {...}?,
                "multimodal": [{"kind": str, "uri": str, "tokens": int?,
                                "grid_thw": [int, int, int]?}, ...]?},
     "members": [{"index": int, "status": str, "sample": {...}, "response": str?,
                  "reward": {str: float}?, "finish_reason": str?, "error": str?,
                  "spans": [[start, length, version, lineage], ...]?, "session_id": str?,
                  "routed_experts": True (in the column) or str (their address)?,
                  "tool_calls": [{"id": str, "name": str, "arguments": {...}?,
                                  "raw_arguments": str?}, ...]?}, ...],
     "columns": {"prompt_ids": {"dtype": "<i4", "data": bin}, "lengths": …, "response_ids": …,
                 "logprobs": …, "mask": …? (where some token is not trained),
                 "ref_logprobs": …?, "values": …? (NaN for all tokens of a member without),
                 "routed_experts": {…, "shape": [rows, layers, top_k]}?}}

The document may be stored in one zstd frame (magic 28 B5 2F FD, content size in its header, no
dictionary): any writer may do so, every reader must check for it. Checksum and size of a payload
are those of the stored bytes.

Columns are raw little-endian arrays, never lists of numbers. The prompt is stored once per group.
`decode` checks size, nesting, types, lengths, NaN and schema, and its errors name what is wrong and
where. Scripts never see these bytes (I14).

A document that `encode` wrote is read without copying its columns, which are its last entry and
nearly all of its bytes. Any other document is read as a whole by msgpack. The results are the same,
and only the second reader raises errors.
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
"""Declared length of one map or array, for which memory is allocated before the items are read."""

MAX_NESTING = 32
"""Deeper documents would exceed the recursion limit of other readers, and of our encoder."""

_OWN_ENTRIES = ("schema", "gid", "task", "shared", "members", "columns")
_FIRST_BYTES = 32 * 2**10
"""Bytes that msgpack reads at first: everything but the columns, where texts are short."""


def read_document(data: bytes | memoryview) -> dict[str, Any]:
    """Return the unchecked document, with columns as views of `data` where possible.

    Raises WireError for bytes that are no document of limited size.
    """
    if len(data) > MAX_BYTES:
        raise WireError(
            f"the document has {len(data)} bytes", hint=f"at most {MAX_BYTES} are accepted"
        )
    document = _read_own(memoryview(data)) or _read_any(data)
    if not isinstance(document, dict):
        raise WireError(f"the document is a {type(document).__name__}, not a map")
    return document


def check_nesting(value: Any) -> None:
    """Raise WireError where maps and arrays are nested too deeply, in what has no schema."""
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
    """Return the document; None where `encode` did not write it."""
    try:
        try:
            document, start = _read_head(data[:_FIRST_BYTES])
        except msgpack.OutOfData:
            document, start = _read_head(data[:MAX_CONTAINERS])
        document["columns"] = read_own_columns(data, start)
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
    """Return all entries, the last one without its value, and the offset of that value."""
    # needs no count of containers: there are fewer than bytes, of which it gets MAX_CONTAINERS
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
    raise WireError(f"msgpack extension type {code} is not part of the format")


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
    """Return the bytes of a group, with one copy of its columns and no look at single tokens."""
    entries = {
        "schema": SCHEMA,
        "gid": group.gid,
        "task": group.task,
        "shared": group.shared,
        "members": group.members,
    }
    try:
        # the columns replace its last byte, which is the None
        head = memoryview(msgpack.packb(entries | {"columns": None}))[:-1]
        return b"".join([head, *pack_columns(columns_of(group))])
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"group {group.gid} has a value that msgpack cannot encode: {error}",
            hint="use text, numbers, lists and maps in messages, ground_truth, extra and reward",
        ) from error


def encode_checked(group: RolloutGroup) -> bytes:
    """Return the bytes of a group after a test that they can be read.

    Raises what `decode` raises for them.
    """
    data = encode(group)
    decode(data)  # the bytes are tested, because encoding changes values: a tuple becomes a list
    return data


def decode(data: bytes | memoryview) -> RolloutGroup:
    """Return the group in `data`, with columns as views of it, or of what it expands to.

    Raises:
        SchemaVersionError: written by another version.
        WireError: the bytes are no complete, consistent group.
    """
    document = read_document(expand(data))
    _check_types(document)
    columns = unpack_columns(document["columns"])
    members = document["members"]
    _check_members(members, columns)
    absent: dict[str, Any] = {
        "messages": [],
        "data_source": None,
        "ground_truth": None,
        "extra": {},
    }
    shared = absent | document["shared"]
    return RolloutGroup.from_columns(document["gid"], document["task"], shared, members, columns)


def _check_types(document: dict[str, Any]) -> None:
    if document.get("schema") != SCHEMA:
        raise SchemaVersionError(
            f"the document has schema {reprlib.repr(document.get('schema'))}, this version reads "
            f"{SCHEMA}"
        )
    check_schema(document)
    check_nesting(document["shared"])


def _check_members(members: list[Member], columns: Columns) -> None:
    """Check columns and members against each other, and add a mask where there is none."""
    check_columns(columns, [member.get("routed_experts") is True for member in members])
    lengths = columns["lengths"].tolist()
    for index, (member, tokens) in enumerate(zip(members, lengths, strict=True)):
        for span in member.get("spans", ()):
            if span[0] + span[1] > tokens:
                raise WireError(
                    f"at members.{index}.spans: {reprlib.repr(span)} is outside of {tokens} tokens"
                )
        check_nesting(member["sample"].get("structured"))
        if calls := member.get("tool_calls"):
            check_nesting([call.get("arguments") for call in calls])
        if member.get("routed_experts") is False:
            raise WireError(f"at members.{index}.routed_experts: false", hint="leave it out")
