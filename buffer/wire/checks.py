"""Checks what a document of the wire format says against itself, before anything uses it.

Types of values are checked while they are read (`wire_schema`), columns in `column_checks`. Here:
values without a type of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgpack
from msgspec import UNSET

from buffer.errors import WireError
from buffer.wire.column_checks import Bounds, check_columns
from buffer.wire.document import Own, Shared
from buffer.wire.table import Table

MAX_NESTING = 32
"""Deeper documents would exceed the recursion limit of other readers, and of our encoder."""

MAX_CONTAINERS = 2**18
"""Maps and arrays in one document: an empty map is one byte on the wire and 64 in memory."""

_HEAD_BYTES = 2**19
"""A head of this size cannot contain many more containers than allowed."""

_CONTAINERS = frozenset({dict, list, tuple})
_PLAIN = _CONTAINERS | {str, int, float, bool, type(None), bytes}
_TEXT = frozenset({str})
_any_values = attrgetter("messages", "tools", "tool_choice", "extra", "ground_truth")


def check_containers(data: bytes | memoryview) -> None:
    """Raise WireError for more maps and arrays than a group has."""
    if len(data) <= _HEAD_BYTES or _has_short_head(data):
        return
    left = MAX_CONTAINERS

    def count(container: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError(
                "too many maps and arrays in one document", hint=f"at most {MAX_CONTAINERS}"
            )

    limits: dict[str, Any] = {"max_array_len": MAX_CONTAINERS, "max_map_len": MAX_CONTAINERS}
    try:
        msgpack.unpackb(data, object_hook=count, list_hook=count, **limits)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a msgpack document: {error}") from error


def _has_short_head(data: bytes | memoryview) -> bool:
    """Return whether all entries but the last are within the first bytes."""
    unpacker = msgpack.Unpacker(read_size=_HEAD_BYTES)
    unpacker.feed(data[:_HEAD_BYTES])
    try:
        for _ in range(2 * unpacker.read_map_header() - 1):
            unpacker.skip()
    except (ValueError, msgpack.UnpackException, RecursionError):
        return False
    return True


def check_table(table: Table) -> Bounds:
    """Check the table of a group, whose values have the types of the format.

    Return the bounds of its columns. Raises WireError.
    """
    _check_texts(table)
    return check_columns(table)


def _check_texts(table: Table) -> None:
    last = -1
    for n in table.own:
        if not last < n < len(table.responses):
            raise WireError(f"at own: position {n} of {len(table.responses)} rollouts")
        last = n
    for name, names in (
        ("finish_reasons", table.finish_reasons),
        ("lineages", table.lineages),
        ("rewards", table.reward_names),
        ("teachers", table.teachers),
    ):
        if len(names) > 1 and len(set(names)) != len(names):
            raise WireError(f"at {name}: a name twice")
    try:
        check_plain("the texts", _untyped([table.shared, *table.own.values()]))
    except WireError:
        _name_text(table)
        raise


def _name_text(table: Table) -> None:
    """Raise the error of the first text of a table that has one, with its place."""
    check_plain("shared", _untyped([table.shared]))
    for n, own in table.own.items():
        check_plain(f"own.{n}", _untyped([own]))


def _untyped(texts: Sequence[Shared | Own]) -> list[Any]:
    """Return the values that have no schema, and are set."""
    values = [value for part in texts for value in _any_values(part) if value is not UNSET]
    for part in texts:
        if part.sample and part.sample.structured:
            values.append(part.sample.structured.json_schema)
        if type(part) is Own and part.tool_calls:
            values += [call.arguments for call in part.tool_calls]
    return values


def check_plain(where: str, values: Sequence[Any]) -> None:
    """Raise WireError for values of other types than msgpack's, or nested too deeply.

    `where`: named in the error.
    """
    for level in _levels(where, values):
        kinds = set(map(type, level))
        if not kinds <= _PLAIN:
            (other, *_) = (kind.__name__ for kind in kinds - _PLAIN)
            raise WireError(f"at {where}: {other} is not part of the format")
        if kinds.isdisjoint(_CONTAINERS):
            return
        for item in level:
            if type(item) is dict and item and set(map(type, item)) != _TEXT:
                raise WireError(f"at {where}: a key that is not a text")


def check_nesting(where: str, values: Sequence[Any]) -> None:
    """Raise WireError for maps and arrays that are nested too deeply."""
    for _ in _levels(where, values):
        pass


def _levels(where: str, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the values, what they contain, what that contains, and so on."""
    level: Sequence[Any] = values
    for _ in range(MAX_NESTING):
        if not level:
            return
        yield level
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                below += item.values()
            elif type(item) in (list, tuple):
                below += item
        level = below
    if level:
        raise WireError(
            f"at {where}: maps and arrays are nested too deeply",
            hint=f"at most {MAX_NESTING} levels",
        )
