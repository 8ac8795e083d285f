"""Check a document against itself before anything uses it.

`document` checks types while it reads; here are untyped values, and columns against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.column import parts_of
from buffer.wire.columns import column_named, known_column
from buffer.wire.document import (
    CORE,
    NO_FINISH,
    STATUSES,
    Columns,
    Head,
    Own,
    Shared,
    ids_of,
    layout_of,
    optional_of,
    tokens_of,
)

MAX_NESTING = 32
"""Deeper documents would exceed the recursion limit of other readers, and of our encoder."""

MAX_CONTAINERS = 2**18
"""Maps and arrays in one document: an empty map takes 1 byte on the wire and 64 in memory."""

_HEAD_BYTES = 2**19
"""A head of this size cannot contain many more containers than allowed."""

_CONTAINERS = frozenset({dict, list, tuple})
_PLAIN = _CONTAINERS | {str, int, float, bool, type(None), bytes}
_TEXT = frozenset({str})
_any_values = attrgetter("messages", "tools", "tool_choice", "extra", "ground_truth")


def check_containers(data: bytes | memoryview) -> None:
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


def check_groups(heads: Sequence[Head], columns: Sequence[Columns]) -> list[Bounds]:
    """Check the parts of groups and return the bounds of their columns. Raises WireError.

    Groups of all writers are checked: a checksum proves that these are the bytes
    that were sent, not that a trainer can read them.
    """
    _check_texts(heads)
    sizes = [_check_shapes(head, own) for head, own in zip(heads, columns, strict=True)]
    # apart, because the large columns drive all else out of the processor's cache
    bounds = list(map(_check_values, columns))
    for head, own, lengths in zip(heads, columns, sizes, strict=True):
        for name in optional_of(own):
            known_column(name).check(own, lengths, len(own["prompt_ids"]))
        if head.own:
            _check_files(head, own)
    return bounds


def _check_texts(heads: Sequence[Head]) -> None:
    for head in heads:
        last = -1
        for n, _ in head.own:
            if not last < n < len(head.responses):
                raise WireError(f"at own: position {n} of {len(head.responses)} rollouts")
            last = n
        for name in ("finish_reasons", "lineages", "rewards"):
            names = getattr(head, name)
            if len(names) > 1 and len(set(names)) != len(names):
                raise WireError(f"at {name}: a name twice")
    parts: list[Shared | Own] = [head.shared for head in heads]
    parts += [own for head in heads for _, own in head.own]
    try:
        check_plain("the texts", _untyped(parts))
    except WireError:
        for head in heads:
            check_plain("shared", _untyped([head.shared]))
            for n, own in head.own:
                check_plain(f"own.{n}", _untyped([own]))
        raise


def _untyped(texts: Sequence[Shared | Own]) -> list[Any]:
    values = [value for part in texts for value in _any_values(part) if value is not UNSET]
    for part in texts:
        if part.sample and part.sample.structured:
            values.append(part.sample.structured.json_schema)
        if type(part) is Own and part.tool_calls:
            values += [call.arguments for call in part.tool_calls]
    return values


def check_plain(where: str, values: Sequence[Any]) -> None:
    """Raise WireError, naming `where`, for types that msgpack lacks, or too deep nesting."""
    level: Sequence[Any] = values
    for _ in range(MAX_NESTING):
        kinds = set(map(type, level))
        if not kinds <= _PLAIN:
            (other, *_) = (kind.__name__ for kind in kinds - _PLAIN)
            raise WireError(f"at {where}: {other} is not part of the format")
        if kinds.isdisjoint(_CONTAINERS):
            return
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict and item:
                if set(map(type, item)) != _TEXT:
                    raise WireError(f"at {where}: a key that is not a text")
                below += item.values()
            elif kind is list or kind is tuple:
                below += item
        level = below
    if level:
        raise WireError(
            f"at {where}: maps and arrays are nested too deeply",
            hint=f"at most {MAX_NESTING} levels",
        )


BIGGEST = 2**53 - 1
"""The largest integer that is exact in every language."""

_LARGEST = float(np.finfo("<f4").max)
_UNSIGNED = np.dtype("<u4")
_NAMED = {"finishes": "finish_reasons", "rewards": "rewards", "spans": "lineages"}
"""Columns that exist if the head has names for them."""


class Bounds(NamedTuple):
    """The largest token id of a group (2^31 or more: one is negative), and its logprobs' range."""

    largest_id: int
    lowest_logprob: float
    highest_logprob: float


def bounds_of(columns: Columns) -> Bounds:
    """Return the bounds of columns: nan if a logprob is nan, 0 without values."""
    # ufuncs, because the methods of arrays call them through two functions in Python
    logprobs = columns["logprobs"]
    return Bounds(
        max([_largest(columns[name]) for name in ids_of(columns)]),
        float(np.minimum.reduce(logprobs, initial=0)),
        float(np.maximum.reduce(logprobs, initial=0)),
    )


def _largest(ids: NDArray[Any]) -> int:
    return int(np.maximum.reduce(ids.view(_UNSIGNED), axis=None, initial=0))


def _check_shapes(head: Head, columns: Columns) -> list[int]:
    """Return the lengths of the rollouts."""
    rollouts = len(head.responses)
    lengths: list[int] = columns["lengths"].tolist()
    if len(lengths) == rollouts and min(lengths) < 0:
        raise WireError("at columns.lengths: a negative length")
    for name, names in _NAMED.items():
        if (name in columns) != bool(getattr(head, names)):
            raise WireError(f"at columns.{name}: the column and {names} need each other")
    sizes = {"rollout": rollouts, "token": sum(lengths)}
    for name, column in columns.items():
        axis = (CORE.get(name) or layout_of(name)).axis
        if axis and len(column) != sizes[axis]:
            raise _wrong_shape(name, column, (sizes[axis], *column.shape[1:]), sizes)
    if "rewards" in columns and columns["rewards"].shape[1] != len(head.rewards):
        raise _wrong_shape("rewards", columns["rewards"], (rollouts, len(head.rewards)), sizes)
    if "finishes" in columns:
        used = set(columns["finishes"].tobytes()) - {NO_FINISH}
        if not used or max(used) >= len(head.finish_reasons):
            raise WireError(f"at columns.finishes: a value without a name: {head.finish_reasons}")
    if "spans" in columns:
        _check_spans(head, columns["spans"], lengths)
    return lengths


def _wrong_shape(
    name: str, column: NDArray[Any], expected: tuple[int, ...], sizes: Mapping[str, int]
) -> WireError:
    return WireError(
        f"at columns.{name}: shape {list(column.shape)}, expected {list(expected)} "
        f"of {sizes['rollout']} rollouts with {sizes['token']} response tokens"
    )


def _check_values(columns: Columns) -> Bounds:
    if min(columns["indices"].tolist()) < 0:
        raise WireError("at columns.indices: a negative value")
    if max(columns["statuses"].tobytes()) >= len(STATUSES):
        raise WireError(f"at columns.statuses: a value above {len(STATUSES) - 1}")
    if "mask" in columns and np.maximum.reduce(columns["mask"], initial=0) > 1:
        raise WireError("at columns.mask: a value that is neither 0 nor 1")
    # trainers compute with float32; NaN compares as False
    rewards = columns["rewards"].ravel().tolist() if "rewards" in columns else ()
    if any([abs(value) > _LARGEST for value in rewards]):
        raise WireError(f"at columns.rewards: a value beyond {_LARGEST:.3g}, the range of float32")
    bounds = bounds_of(columns)
    if bounds.largest_id >= 2**31:
        wrong = [name for name in ids_of(columns) if _largest(columns[name]) >= 2**31]
        raise WireError(f"at columns.{wrong[0]}: a negative value")
    if not math.isfinite(bounds.lowest_logprob) or not math.isfinite(bounds.highest_logprob):
        raise WireError("at columns.logprobs: a value that is NaN or infinite")
    return bounds


def _check_spans(head: Head, spans: NDArray[Any], lengths: Sequence[int]) -> None:
    if spans.shape[1] != 5 or not len(spans):
        raise WireError(f"at columns.spans: shape {list(spans.shape)}, expected [n, 5]")
    last = 0
    # a loop: a rollout has one span or a few, and every call of numpy costs as much as five of them
    for n, span in enumerate(spans.tolist()):
        rollout, start, length, version, lineage = span
        if not (
            last <= rollout < len(lengths)
            and start >= 0
            and 0 <= length <= lengths[rollout] - start
            and 0 <= version <= BIGGEST
            and 0 <= lineage < len(head.lineages)
        ):
            raise WireError(
                f"at columns.spans.{n}: {span} is not [rollout, start, length, version, lineage] "
                f"within {len(lengths)} rollouts in order, the tokens of this one, versions from 0 "
                f"to 2^53 - 1, and {len(head.lineages)} lineages"
            )
        last = rollout


def _check_files(head: Head, columns: Columns) -> None:
    """Check that files are of large columns, and of rollouts without values in the document."""
    filed: dict[str, list[int]] = {}
    for n, own in head.own:
        for name in own.files:
            filed.setdefault(name, []).append(n)
    for name, rollouts in filed.items():
        column = column_named(name)
        if column is None or not column.is_large:
            raise WireError(f"at own: the file of {name!r:.80}, which is no large column")
        if not parts_of(columns, name):
            continue
        inline = column.split(columns, tokens_of(columns), len(columns["prompt_ids"]))
        if any(inline[n] is not None for n in rollouts):
            raise WireError(f"at own: a file of {name} for a rollout that has values of the column")
