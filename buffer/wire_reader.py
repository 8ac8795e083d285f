"""From bytes to a plain document: nothing is believed yet but that it is msgpack of bounded size.

What `wire.encode` writes is read without copying its columns, which are the last entry and nearly all of the bytes.
Whatever looks otherwise is read as a whole by the library. The answer is the same, and so are the errors: only the
second reader raises any.
"""

from __future__ import annotations

from typing import Any

import msgpack

from buffer.errors import WireError
from buffer.wire_columns import read_own_columns

MAX_BYTES = 256 * 2**20
"""A larger document is refused unread."""

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
    """The document as the library gives it, its columns perhaps as views of `data`. Raises WireError."""
    if len(data) > MAX_BYTES:
        raise WireError(f"document of {len(data)} bytes", hint=f"at most {MAX_BYTES}")
    document = _read_own(memoryview(data)) or _read_any(data)
    if not isinstance(document, dict):
        raise WireError(f"the document is a {type(document).__name__}, not a map")
    return document


def check_nesting(value: Any) -> None:
    """Raise WireError where maps and arrays lie too deep in each other. For what no schema describes."""
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
        raise WireError(f"not a msgpack document: {error} (it starts with {bytes(data[:16])!r})") from error


def _read_own(data: memoryview) -> dict[str, Any] | None:
    """None where the document is not one of `wire.encode`."""
    try:
        try:
            document, place = _read_head(data[:_FIRST_BYTES])
        except msgpack.OutOfData:
            document, place = _read_head(data[:MAX_CONTAINERS])
        document["columns"] = read_own_columns(data, place)
    except (ValueError, TypeError, IndexError, msgpack.exceptions.UnpackException, RecursionError, WireError):
        return None
    return document if tuple(document) == _OWN_ENTRIES and document["columns"] is not None else None


def _read_head(data: memoryview) -> tuple[dict[str, Any], int]:
    """All entries but the last one, the name of that, and where its value begins.

    Containers need no count: there cannot be more of them than bytes, and it is given no more than MAX_CONTAINERS.
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
            raise WireError("too many maps and arrays in one document", hint=f"at most {MAX_CONTAINERS}")
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
