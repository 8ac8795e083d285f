"""The token columns of the wire format: raw little-endian arrays, checked against each other before anybody uses them.

Which there are, and what each holds, stands in `buffer.wire`; an error names the column.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from buffer.errors import WireError
from buffer.group import RolloutGroup
from buffer.rollout import expert_rows

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

Columns = dict[str, NDArray[Any]]


class Column(BaseModel):
    """One array on the wire; only `routed_experts` has a shape."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    data: bytes
    shape: list[int] | None = None


def pack_columns(group: RolloutGroup) -> dict[str, dict[str, Any]]:
    """The columns of a group; a mask of all ones, and what no rollout has, is left out."""
    columns: Columns = {name: getattr(group, name) for name in NEEDED}
    if not group.mask.all():
        columns["mask"] = group.mask
    optional = {name: getattr(group, name) for name in OPTIONAL}
    columns |= {name: column for name, column in optional.items() if column is not None}
    return {name: _pack(column, DTYPES[name]) for name, column in columns.items()}


def unpack_columns(packed: Mapping[str, Column], has_experts: Sequence[bool]) -> Columns:
    """The columns as views of the received bytes; `has_experts`: of each member, whether its experts are inline.

    Raises WireError where they do not agree with each other or with the members.
    """
    columns = {name: _unpack(name, column) for name, column in packed.items()}
    _check_lengths(columns, len(has_experts))
    _check_values(columns)
    for name in ("ref_logprobs", "values"):
        if name in columns:
            _check_optional(name, columns[name], columns["lengths"])
    _check_experts(columns, has_experts)
    return columns


def _pack(column: NDArray[Any], dtype: str) -> dict[str, Any]:
    packed: dict[str, Any] = {"dtype": dtype, "data": np.ascontiguousarray(column, dtype).tobytes()}
    return packed | {"shape": list(column.shape)} if column.ndim > 1 else packed


def _unpack(name: str, column: Column) -> NDArray[Any]:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise WireError(f"at columns.{name[:32]}: unknown column")
    if column.dtype != dtype:
        raise WireError(f"at columns.{name}: dtype {column.dtype[:16]!r}, expected {dtype!r}")
    if len(column.data) % np.dtype(dtype).itemsize:
        raise WireError(f"at columns.{name}: {len(column.data)} bytes are no whole {dtype} array")
    return _shaped(name, np.frombuffer(column.data, dtype), column.shape)


def _shaped(name: str, flat: NDArray[Any], shape: list[int] | None) -> NDArray[Any]:
    if name != "routed_experts":
        if shape is not None:
            raise WireError(f"at columns.{name}.shape: only routed_experts has one")
        return flat
    if shape is None or len(shape) != 3 or min(shape) < 1 or math.prod(shape) != len(flat):
        raise WireError(f"at columns.{name}.shape: {reprlib.repr(shape)} for {len(flat)} values")
    return flat.reshape(shape)


def _check_lengths(columns: Columns, members: int) -> None:
    missing = set(NEEDED) - set(columns)
    if missing:
        raise WireError(f"at columns: {sorted(missing)} missing")
    lengths = columns["lengths"]
    if len(lengths) != members:
        raise WireError(f"at columns.lengths: {len(lengths)} values for {members} members")
    if (lengths < 0).any():
        raise WireError("at columns.lengths: negative")
    tokens = int(lengths.sum(dtype=np.int64))
    for name in PER_TOKEN:
        if name in columns and len(columns[name]) != tokens:
            raise WireError(f"at columns.{name}: {len(columns[name])} values for {tokens} response tokens")
    columns.setdefault("mask", np.ones(tokens, "u1"))


def _check_values(columns: Columns) -> None:
    if (columns["mask"] > 1).any():
        raise WireError("at columns.mask: a value that is neither 0 nor 1")
    for name in ("prompt_ids", "response_ids"):
        if (columns[name] < 0).any():
            raise WireError(f"at columns.{name}: a negative token id")
    if not np.isfinite(columns["logprobs"]).all():
        raise WireError("at columns.logprobs: NaN or infinite")


def _check_optional(name: str, column: NDArray[Any], lengths: NDArray[Any]) -> None:
    """A member has all values or (NaN) none; a column that nobody has is not written."""
    if np.isinf(column).any():
        raise WireError(f"at columns.{name}: infinite")
    absent = np.isnan(column)
    if absent.all():
        raise WireError(f"at columns.{name}: no member has a value")
    parts = np.split(absent, np.cumsum(lengths)[:-1])
    if any(part.any() and not part.all() for part in parts):
        raise WireError(f"at columns.{name}: NaN for some tokens of a member, but not for all")


def _check_experts(columns: Columns, has_experts: Sequence[bool]) -> None:
    prompt, lengths = len(columns["prompt_ids"]), columns["lengths"].tolist()
    inline = [expert_rows(prompt, n) for n, is_inline in zip(lengths, has_experts, strict=True) if is_inline]
    experts = columns.get("routed_experts")
    found = 0 if experts is None else len(experts)
    if found != sum(inline) or (experts is None) != (not inline):
        raise WireError(f"at columns.routed_experts: {found} rows, its members have {sum(inline)}")
    if experts is not None and (experts < 0).any():
        raise WireError("at columns.routed_experts: a negative expert")
