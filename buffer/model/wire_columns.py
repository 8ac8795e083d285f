"""The token columns of the wire format, raw little-endian arrays that are checked before use.

`buffer.model.wire` lists them; an error names the column.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import msgpack
import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.model.group import RolloutGroup
from buffer.model.rollout import expert_rows

NEEDED = ("prompt_ids", "lengths", "response_ids", "logprobs")
OPTIONAL = ("ref_logprobs", "values", "routed_experts")
PER_TOKEN = ("response_ids", "logprobs", "mask", "ref_logprobs", "values")

DTYPES = {
    "prompt_ids": "<i4",
    "lengths": "<i4",
    "response_ids": "<i4",
    "logprobs": "<f4",
    "mask": "|u1",
    "ref_logprobs": "<f4",
    "values": "<f4",
    "routed_experts": "<i2",
}

_SIZES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}

Columns = dict[str, NDArray[Any]]


_MAP = 0x80
_BIN_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""Bytes of the length in a bin 8, 16 and 32 of msgpack."""


def _head(name: str, entries: int) -> bytes:
    dtype: bytes = msgpack.packb("dtype") + msgpack.packb(DTYPES[name])
    head: bytes = msgpack.packb(name) + bytes([_MAP + entries]) + dtype + msgpack.packb("data")
    return head


_HEADS = {name: _head(name, 2) for name in DTYPES}
"""The bytes before the length and the data of a flat column."""

_LINE_BYTES = 48
"""At least the longest of these heads, with a length."""


class Column(TypedDict):
    """One array on the wire; only `routed_experts` has a shape."""

    dtype: str
    data: bytes | memoryview
    shape: NotRequired[list[int] | None]


def read_own_columns(data: memoryview, start: int) -> dict[str, Column] | None:
    """Return the columns from `start` on as views; None where `wire.encode` did not write them."""
    columns: dict[str, Column] = {}
    data = data.toreadonly()
    count = data[start] - _MAP
    at = start + 1
    if not 0 <= count < 16:
        return None
    for _ in range(count):
        line = bytes(data[at : at + _LINE_BYTES])
        name = line[1 : 1 + (line[0] & 0x1F)].decode(errors="replace")
        head = _HEADS.get(name, b"?")
        kind = len(head)
        width = _BIN_WIDTHS.get(line[kind]) if line.startswith(head) else None
        if width is None:
            return None
        begin = at + kind + 1 + width
        at = begin + int.from_bytes(line[kind + 1 : kind + 1 + width])
        columns[name] = {"dtype": DTYPES[name], "data": data[begin:at]}
    return columns if at == len(data) else None


def columns_of(group: RolloutGroup) -> Columns:
    """Return the columns to write, without a mask of ones and without columns of no rollout."""
    columns: Columns = {name: getattr(group, name) for name in NEEDED}
    if not group.mask.min(initial=1):
        columns["mask"] = group.mask
    optional = {name: getattr(group, name) for name in OPTIONAL}
    return columns | {name: column for name, column in optional.items() if column is not None}


def pack_columns(columns: Columns) -> list[bytes | memoryview]:
    """Return the columns as a msgpack map, in pieces to be joined, so that each is copied once."""
    packed: list[bytes | memoryview] = [bytes([_MAP + len(columns)])]
    for name, column in columns.items():
        packed += _pack(name, column)
    return packed


def unpack_columns(packed: Mapping[str, Column]) -> Columns:
    """Return the columns as views of the received bytes. Raises WireError for other data."""
    return {name: _unpack(name, column) for name, column in packed.items()}


def check_columns(columns: Columns, has_experts: Sequence[bool]) -> None:
    """Check the columns against each other and the members, and add a mask where there is none.

    `has_experts`: whether the experts of each member are in the column. Raises WireError.
    """
    _check_lengths(columns, len(has_experts))
    _check_values(columns)
    for name in ("ref_logprobs", "values"):
        if name in columns:
            _check_optional(name, columns[name], columns["lengths"])
    _check_experts(columns, has_experts)


def _pack(name: str, column: NDArray[Any]) -> list[bytes | memoryview]:
    data = np.ascontiguousarray(column, DTYPES[name])
    kind, width = next(
        (pair for pair in _BIN_WIDTHS.items() if data.nbytes < 256 ** pair[1]), (0xC6, 4)
    )
    length = bytes([kind]) + data.nbytes.to_bytes(width)
    if column.ndim == 1:
        return [_HEADS[name], length, data.data]
    shape: bytes = msgpack.packb("shape") + msgpack.packb(list(column.shape))
    return [_head(name, 3), length, data.tobytes(), shape]


def _unpack(name: str, column: Column) -> NDArray[Any]:
    dtype = DTYPES[name]
    data = column["data"]
    if column["dtype"] != dtype:
        raise WireError(f"at columns.{name}: dtype {column['dtype'][:16]!r}, expected {dtype!r}")
    if len(data) % _SIZES[name]:
        raise WireError(
            f"at columns.{name}: {len(data)} bytes are not a multiple of {_SIZES[name]}"
        )
    return _shaped(name, np.frombuffer(data, dtype), column.get("shape"))


def _shaped(name: str, flat: NDArray[Any], shape: list[int] | None) -> NDArray[Any]:
    if name != "routed_experts":
        if shape is not None:
            raise WireError(f"at columns.{name}.shape: only routed_experts has a shape")
        return flat
    if shape is None or len(shape) != 3 or min(shape) < 1 or math.prod(shape) != len(flat):
        raise WireError(f"at columns.{name}.shape: {reprlib.repr(shape)} for {len(flat)} values")
    return flat.reshape(shape)


def _check_lengths(columns: Columns, members: int) -> None:
    lengths = columns["lengths"].tolist()
    if len(lengths) != members:
        raise WireError(f"at columns.lengths: {len(lengths)} values for {members} members")
    if min(lengths) < 0:
        raise WireError("at columns.lengths: a negative length")
    tokens = sum(lengths)
    for name in PER_TOKEN:
        if name in columns and len(columns[name]) != tokens:
            raise WireError(
                f"at columns.{name}: {len(columns[name])} values for {tokens} response tokens"
            )
    if "mask" not in columns:
        columns["mask"] = np.ones(tokens, "u1")


def _check_values(columns: Columns) -> None:
    # ufuncs, because the methods of arrays call them through two functions in Python
    if np.maximum.reduce(columns["mask"], initial=0) > 1:
        raise WireError("at columns.mask: a value that is neither 0 nor 1")
    for name in ("prompt_ids", "response_ids"):
        if np.minimum.reduce(columns[name], initial=0) < 0:
            raise WireError(f"at columns.{name}: a negative token id")
    if not np.isfinite(columns["logprobs"]).all():
        raise WireError("at columns.logprobs: a value that is NaN or infinite")


def _check_optional(name: str, column: NDArray[Any], lengths: NDArray[Any]) -> None:
    """Check that each member has all values or none (NaN), and that some member has values."""
    if np.isinf(column).any():
        raise WireError(f"at columns.{name}: an infinite value")
    absent = np.isnan(column)
    if absent.all():
        raise WireError(f"at columns.{name}: no member has a value")
    parts = np.split(absent, np.cumsum(lengths)[:-1])
    if any(part.any() and not part.all() for part in parts):
        raise WireError(f"at columns.{name}: NaN for some tokens of a member, but not for all")


def _check_experts(columns: Columns, has_experts: Sequence[bool]) -> None:
    if "routed_experts" not in columns and not any(has_experts):
        return
    prompt = len(columns["prompt_ids"])
    lengths = columns["lengths"].tolist()
    members = zip(lengths, has_experts, strict=True)
    inline = [expert_rows(prompt, length) for length, is_inline in members if is_inline]
    experts = columns.get("routed_experts")
    found = 0 if experts is None else len(experts)
    if found != sum(inline) or (experts is None) != (not inline):
        raise WireError(f"at columns.routed_experts: {found} rows, its members have {sum(inline)}")
    if experts is not None and (experts < 0).any():
        raise WireError("at columns.routed_experts: a negative expert")
