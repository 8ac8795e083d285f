"""The columns of the wire format: raw little-endian arrays, one after another in one buffer.

`LAYOUT` has all columns in order. A directory names those of a group: {name: [offset in bytes,
*shape]}. Each starts at a multiple of eight bytes, so that readers use it in place.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from operator import lt
from typing import Any

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from buffer.errors import WireError

Columns = dict[str, NDArray[Any]]

LAYOUT = {
    "spans": ("<i8", 2),
    "rewards": ("<f8", 2),
    "indices": ("<i4", 1),
    "lengths": ("<i4", 1),
    "prompt_ids": ("<i4", 1),
    "response_ids": ("<i4", 1),
    "logprobs": ("<f4", 1),
    "ref_logprobs": ("<f4", 1),
    "values": ("<f4", 1),
    "token_rewards": ("<f4", 1),
    "teacher_logprobs": ("<f4", 2),
    "routed_experts": ("<i2", 3),
    "statuses": ("|u1", 1),
    "finishes": ("|u1", 1),
    "mask": ("|u1", 1),
    "has_experts": ("|u1", 1),
}

OPTIONAL = ("ref_logprobs", "values", "token_rewards")
"""Columns over all tokens, with NaN for a rollout without."""

NEEDED = ("indices", "lengths", "prompt_ids", "response_ids", "logprobs", "statuses")

ALIGNMENT = 8

_DTYPES = {
    name: (np.dtype(dtype), ndim, np.dtype(dtype).itemsize)
    for name, (dtype, ndim) in LAYOUT.items()
}
_COPIED_BYTES = 4096
_PADDING = [bytes(count) for count in range(ALIGNMENT)]


def pack(columns: Columns) -> tuple[dict[str, list[int]], list[bytes | memoryview], int]:
    """Return the directory of the columns, the pieces of the buffer to join, and its size in bytes.

    `columns` are in the order of `LAYOUT`; large ones are not copied. Raises WireError.
    """
    directory = {}
    pieces: list[bytes | memoryview] = []
    small = b""
    size = 0
    for name, column in columns.items():
        dtype, ndim, _ = _DTYPES[name]
        if column.dtype != dtype or column.ndim != ndim:
            raise WireError(f"column {name} is {column.dtype}{list(column.shape)}, not {dtype}")
        directory[name] = [size, *column.shape]
        count = column.nbytes
        padding = _PADDING[-count % ALIGNMENT]
        size += count + len(padding)
        if count < _COPIED_BYTES:
            small += column.tobytes() + padding
        else:
            pieces += [small, np.ascontiguousarray(column).data.cast("B")]
            small = padding
    return directory, [*pieces, small], size


def unpack(directory: Mapping[str, list[int]], data: memoryview) -> Columns:
    """Return the columns as views of `data`. Raises WireError for another layout."""
    columns = {}
    end = 0
    for name, entry in _by_offset(directory):
        if name not in _DTYPES:
            raise WireError(f"at columns: unknown column {reprlib.repr(name)}")
        dtype, ndim, size = _DTYPES[name]
        offset = entry[0]
        if len(entry) != 1 + ndim:
            raise WireError(f"at columns.{name}: {len(entry) - 1} dimensions, expected {ndim}")
        if offset < end or offset % ALIGNMENT:
            raise WireError(
                f"at columns.{name}: offset {offset}, expected a multiple of {ALIGNMENT} that is "
                f"not below {end}"
            )
        count = entry[1] if ndim == 1 else math.prod(entry[1:])
        end = offset + count * size
        if end > len(data):
            raise WireError(f"at columns.{name}: it ends at {end}, the data has {len(data)} bytes")
        try:
            columns[name] = np.ndarray(entry[1:], dtype, data, offset)
        except ValueError as error:  # no values, but dimensions that numpy does not have
            raise WireError(f"at columns.{name}: shape {entry[1:]}: {error}") from error
    for name in NEEDED:
        if name not in columns:
            raise WireError(f"at columns: {name} is missing")
    return columns


def _by_offset(directory: Mapping[str, list[int]]) -> Iterable[tuple[str, list[int]]]:
    """Return the entries in the order of their columns: maps have none in some languages."""
    offsets = [entry[0] for entry in directory.values()]
    if all(map(lt, offsets, offsets[1:])):
        return directory.items()
    return sorted(directory.items(), key=lambda item: (item[1][0], math.prod(item[1][1:])))


_REPLACED = frozenset(("mask", "statuses"))
"""Columns that a group may replace (`RolloutGroup.mask`, `set_status`)."""


class Seal:
    """The checksums of the columns of one group, made at once; `columns` may be added to later."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._decoded = [(name, column, _sum(column)) for name, column in columns.items()]

    def changed(self) -> Iterator[str]:
        for name, column, found in self._decoded:
            is_replaced = self._columns.get(name) is not column and name not in _REPLACED
            if is_replaced or _sum(column) != found:
                yield name


def _sum(column: NDArray[Any]) -> int:
    return isal_zlib.crc32(column)
