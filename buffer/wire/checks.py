"""Check a document against itself before anything uses it.

`document` checks types while it reads; here are untyped values, and columns against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.document import OPTIONAL, Columns, Head, Own, Shared
from buffer.wire.rollout import expert_rows
from buffer.wire.sampling_mask import SamplingMask
from buffer.wire.table import NO_FINISH, STATUSES
from buffer.wire.teacher_columns import tops_of

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
    for head, own in zip(heads, columns, strict=True):
        lengths = _check_shapes(head, own)
        _check_optional(head, own, lengths)
        _check_experts(head, own, lengths)
        _check_spans(head, own, lengths)
    # apart, because the large columns drive all else out of the processor's cache
    bounds = list(map(_check_values, columns))
    for head, own in zip(heads, columns, strict=True):
        _check_sampling_mask(head, own)
    return bounds


def _check_texts(heads: Sequence[Head]) -> None:
    for head in heads:
        last = -1
        for n, _ in head.own:
            if not last < n < len(head.responses):
                raise WireError(f"at own: position {n} of {len(head.responses)} rollouts")
            last = n
        for name in ("finish_reasons", "lineages", "rewards", "teachers"):
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
_PER_ROLLOUT = frozenset(("indices", "lengths", "statuses", "finishes", "has_experts"))
_PER_TOKEN = frozenset(("response_ids", "sampling_counts", "logprobs", "mask", *OPTIONAL))
_IDS = ("prompt_ids", "response_ids", "teacher_top_ids", "sampling_ids")
_UNSIGNED = np.dtype("<u4")
_NAMED = {
    "finishes": "finish_reasons",
    "rewards": "rewards",
    "spans": "lineages",
    "teacher_logprobs": "teachers",
    "teacher_top_ids": "teacher_top_k",
    "teacher_top_logprobs": "teacher_top_k",
}
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
        max([_largest(columns[name]) for name in _IDS if name in columns]),
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
    tokens = sum(lengths)
    for name, names in _NAMED.items():
        if (name in columns) != bool(getattr(head, names)):
            raise WireError(f"at columns.{name}: the column and {names} need each other")
    top = (tokens, sum(head.teacher_top_k))
    shapes: dict[str, tuple[int, ...]] = {
        "rewards": (rollouts, len(head.rewards)),
        "teacher_logprobs": (len(head.teachers), tokens),
        "teacher_top_ids": top,
        "teacher_top_logprobs": top,
    }
    for name, column in columns.items():
        if name in _PER_TOKEN:
            expected: tuple[int, ...] = (tokens,)
        elif name in _PER_ROLLOUT:
            expected = (rollouts,)
        else:
            expected = shapes.get(name, column.shape)
        if column.shape != expected:
            raise WireError(
                f"at columns.{name}: shape {list(column.shape)}, expected {list(expected)} "
                f"of {rollouts} rollouts with {tokens} response tokens"
            )
    return lengths


def _check_values(columns: Columns) -> Bounds:
    if min(columns["indices"].tolist()) < 0:
        raise WireError("at columns.indices: a negative value")
    if max(columns["statuses"].tobytes()) >= len(STATUSES):
        raise WireError(f"at columns.statuses: a value above {len(STATUSES) - 1}")
    for name in ("mask", "has_experts"):
        if name in columns and np.maximum.reduce(columns[name], initial=0) > 1:
            raise WireError(f"at columns.{name}: a value that is neither 0 nor 1")
    bounds = bounds_of(columns)
    if bounds.largest_id >= 2**31:
        wrong = [n for n in _IDS if n in columns and _largest(columns[n]) >= 2**31]
        raise WireError(f"at columns.{wrong[0]}: a negative value")
    if not math.isfinite(bounds.lowest_logprob) or not math.isfinite(bounds.highest_logprob):
        raise WireError("at columns.logprobs: a value that is NaN or infinite")
    return bounds


def _check_spans(head: Head, columns: Columns, lengths: Sequence[int]) -> None:
    if "spans" not in columns:
        return
    spans = columns["spans"]
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


def _check_whole(name: str, column: NDArray[Any], lengths: Sequence[int]) -> None:
    """Check that each rollout has all values or none (NaN), and that some rollout has values."""
    if np.isinf(column).any():
        raise WireError(f"at columns.{name}: an infinite value")
    absent = np.isnan(column)
    if absent.all():
        raise WireError(f"at columns.{name}: no rollout has a value")
    counts = np.add.reduceat(np.append(absent, False).astype("<i8"), np.cumsum([0, *lengths[:-1]]))
    given = np.array(lengths)
    partly = (given > 0) & (counts > 0) & (counts < given)
    if partly.any():
        raise WireError(f"at columns.{name}: NaN for some tokens of a rollout, but not for all")


def _check_optional(head: Head, columns: Columns, lengths: Sequence[int]) -> None:
    if "finishes" in columns:
        used = set(columns["finishes"].tobytes()) - {NO_FINISH}
        if not used or max(used) >= len(head.finish_reasons):
            raise WireError(f"at columns.finishes: a value without a name: {head.finish_reasons}")
    # trainers compute with float32; NaN compares as False
    rewards = columns["rewards"].ravel().tolist() if "rewards" in columns else ()
    if any([abs(value) > _LARGEST for value in rewards]):
        raise WireError(f"at columns.rewards: a value beyond {_LARGEST:.3g}, the range of float32")
    for name in OPTIONAL:
        if name in columns:
            _check_whole(name, columns[name], lengths)
    for row in columns.get("teacher_logprobs", ()):
        _check_whole("teacher_logprobs", row, lengths)
    if head.teacher_top_k:
        _check_tops(head, columns, lengths)


def _check_tops(head: Head, columns: Columns, lengths: Sequence[int]) -> None:
    if len(head.teacher_top_k) != len(head.teachers):
        raise WireError(f"at teacher_top_k: {len(head.teachers)} teachers need a number each")
    for _, logprobs in tops_of(head, columns).values():
        absent = np.isnan(logprobs)
        if (absent != absent[:, :1]).any():
            raise WireError("at columns.teacher_top_logprobs: NaN for some of a token's values")
        _check_whole("teacher_top_logprobs", logprobs[:, 0], lengths)
        if np.isinf(logprobs).any():
            raise WireError("at columns.teacher_top_logprobs: an infinite value")


def _check_experts(head: Head, columns: Columns, lengths: Sequence[int]) -> None:
    experts = columns.get("routed_experts")
    inline = columns.get("has_experts")
    if experts is None and inline is None:
        return
    if experts is None or inline is None or not inline.any():
        raise WireError("at columns: routed_experts and has_experts need each other")
    if min(experts.shape) < 1:
        raise WireError(f"at columns.routed_experts: shape {list(experts.shape)}")
    prompt = len(columns["prompt_ids"])
    positions = np.flatnonzero(inline).tolist()
    rows = sum(expert_rows(prompt, lengths[n]) for n in positions)
    if len(experts) != rows:
        raise WireError(f"at columns.routed_experts: {len(experts)} rows, its rollouts have {rows}")
    if any(inline[n] and own.routed_experts is not None for n, own in head.own):
        raise WireError("at own: routed_experts of a rollout that has rows of the column")
    if np.minimum.reduce(experts, axis=None) < 0:
        raise WireError("at columns.routed_experts: a negative expert")


def _check_sampling_mask(head: Head, columns: Columns) -> None:
    if ("sampling_ids" in columns) != ("sampling_counts" in columns):
        raise WireError("at columns: sampling_counts and sampling_ids need each other")
    if "sampling_ids" not in columns:
        return
    mask = SamplingMask(columns["sampling_counts"], columns["sampling_ids"])
    if problem := mask.problem(columns["response_ids"]):
        raise WireError(f"at columns.sampling_ids: the sampling mask is wrong: {problem}")
    ends = np.cumsum(columns["lengths"]).tolist()
    for n, own in head.own:
        own_counts = mask.counts[ends[n - 1] if n else 0 : ends[n]]
        if own.sampling_mask and own_counts.any():
            raise WireError("at own: sampling_mask of a rollout that has ids in the column")
