"""Convert the values of a row to values that a group can store, without loss.

Dates, times, durations (ISO 8601), decimals, fractions, UUIDs and paths become text; arrays,
tensors, tuples and sorted sets become lists; numpy scalars and Enum members become their values; a
missing date becomes null. Other objects, integers over 64 bits and invalid text are refused with
their place. Pictures pass: `image_records` takes them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import NoneType
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from buffer.wire.checks import MAX_NESTING
from producer_workers.datasets.dataset import Problem

HINT = (
    "make it text, a number, a list, or an object whose keys are text; a `record` function may "
    "convert the record"
)
_STAY = frozenset((float, bool, NoneType, bytes))
_SHOWN = 80  # characters of a place or a value in an error


class Unstorable(ValueError):
    """A value that no group can store: its place in the record, and what it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.place = ""

    def inside(self, part: str) -> Unstorable:
        self.place = part + self.place
        return self

    def __str__(self) -> str:
        place = self.place.removeprefix(".")
        shown = f"{place[:_SHOWN]}…" if len(place) > _SHOWN else place
        return f'"{shown}" {self.what}' if place else f"it {self.what}"


def plain_record(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a record with values that can be stored, or are pictures. Raises Unstorable."""
    return _entries(record, 0)  # most columns are stored within `extra`


def plain_problem(problem: Problem) -> Problem:
    """Return a problem whose values can be stored. Raises Unstorable."""
    return problem.model_copy(
        update=_entries({name: getattr(problem, name) for name in _FIELDS}, -1)
    )


_FIELDS = ("messages", "tools", "ground_truth", "data_source", "extra")


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as one that can be stored, in new containers. Raises Unstorable."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind in _STAY:
        return value
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        # Python refuses to write thousands of digits
        shown = f" ({value})" if value.bit_length() < 4 * _SHOWN else ""
        raise Unstorable(f"is an integer of more than 64 bits{shown}: write it as text")
    if depth == MAX_NESTING:
        raise Unstorable(f"is nested too deeply: at most {MAX_NESTING} levels")
    if kind is list:
        return _items(value, depth)
    if kind is dict:
        return _entries(value, depth)
    return _other(value, depth)


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = ascii(value[error.start])
            raise Unstorable(
                f"is text with half of a surrogate pair, {half}, at character {error.start + 1}"
            ) from None
    return value


def _items(values: Iterable[Any], depth: int) -> list[Any]:
    made = []
    for position, value in enumerate(values):
        try:
            made.append(plain(value, depth + 1))
        except Unstorable as error:
            raise error.inside(f"[{position}]") from None
    return made


def _entries(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    made = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise Unstorable(f"has a key that is not text: {key!r:.80}, of {_kind(key)}")
        try:
            made[_text(str.__str__(key))] = plain(value, depth + 1)
        except Unstorable as error:
            raise error.inside(f".{ascii(key)[1:-1]}") from None
    return made


def _other(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        return plain(value.value, depth + 1)
    if isinstance(value, np.generic | np.ndarray):
        return _of_numpy(value, depth)
    kind: type[Any]
    for kind in (str, int, float, bytes):
        if isinstance(value, kind):
            return plain(kind(value))
    if isinstance(value, date | time | timedelta | Decimal):
        return _quantity(value)
    if isinstance(value, (UUID, Fraction, PurePath)):
        return _text(str(value))
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return _container(value, depth)


def _quantity(value: date | time | timedelta | Decimal) -> str | None:
    if isinstance(value, Decimal):
        return format(value, "f")
    if value != value:  # pandas.NaT
        return None
    # those of pandas have nanoseconds, which msgspec drops
    own = getattr(value, "isoformat", None)
    return str(own() if own else msgspec.to_builtins(value))


def _of_numpy(value: np.generic | np.ndarray[Any, Any], depth: int) -> Any:
    if isinstance(value, np.ndarray):
        return _items(value, depth) if value.ndim else plain(value[()], depth + 1)
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else str(np.datetime_as_string(value))
    if isinstance(value, np.timedelta64) and np.isnat(value):
        return None
    item = value.item()
    # of months or nanoseconds, item() is a number without its unit
    has_lost_unit = isinstance(value, np.timedelta64) and isinstance(item, int)
    if has_lost_unit or isinstance(item, np.generic | tuple):
        raise _refused(value)
    return plain(item, depth + 1)


def _container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return _entries(value, depth)
    if isinstance(value, set | frozenset):
        try:
            return _items(sorted(value), depth)
        except TypeError:
            raise _refused(value, " whose values have no order") from None
    if isinstance(value, list | tuple | deque | range) and not hasattr(value, "_fields"):
        return _items(value, depth)
    if is_picture(value):
        return value
    if callable(as_list := getattr(value, "tolist", None)):  # a tensor, a column
        return plain(as_list(), depth + 1)
    raise _refused(value)


def byte_count(value: Any, most: int) -> int:
    """Return the bytes of the texts in a value, keys included; counting ends above `most`.

    An array counts with its bytes, everything else as one byte.
    """
    count = 0
    rest = [value]
    while rest and count <= most:
        found = rest.pop()
        if isinstance(found, str):
            count += len(found) if found.isascii() else len(found.encode(errors="surrogatepass"))
        elif isinstance(found, bytes):
            count += len(found)
        elif isinstance(found, Mapping):
            count += 1
            rest += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            count += 1
            rest += found
        else:
            count += found.nbytes if isinstance(found, np.ndarray) else 1
    return count


def is_picture(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.")


def _refused(value: Any, why: str = "") -> Unstorable:
    return Unstorable(f"is of {_kind(value)}{why}, which cannot be stored")


def _kind(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"type {module}{kind.__qualname__}"
