"""Check a document against itself before anything uses it.

`document` checks the types of values while it reads them. Here: values without a type of their own,
and columns against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.columns import Columns
from buffer.wire.document import Own, Shared
from buffer.wire.rollout import expert_rows
from buffer.wire.table import NO_FINISH, STATUSES, Table

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


BIGGEST = 2**53 - 1
"""The largest integer that is exact in every language."""

_LARGEST = float(np.finfo("<f4").max)
_PER_ROLLOUT = ("indices", "lengths", "statuses", "finishes", "has_experts")
_OPTIONAL = ("ref_logprobs", "values", "token_rewards")
_PER_TOKEN = ("response_ids", "logprobs", "mask", *_OPTIONAL)


class Bounds(NamedTuple):
    """The largest ids of a group, and the range of its logprobs.

    Ids count as unsigned: a negative one is 2^31 or more.
    """

    prompt_id: int
    response_id: int
    lowest_logprob: float
    highest_logprob: float


def bounds_of(columns: Columns) -> Bounds:
    """Return the bounds of some columns; nan where a logprob is, 0 of no values."""
    # ufuncs, because the methods of arrays call them through two functions in Python
    logprobs = columns["logprobs"]
    return Bounds(
        int(np.maximum.reduce(columns["prompt_ids"].view("<u4"), initial=0)),
        int(np.maximum.reduce(columns["response_ids"].view("<u4"), initial=0)),
        float(np.minimum.reduce(logprobs, initial=0)),
        float(np.maximum.reduce(logprobs, initial=0)),
    )


def check_columns(table: Table) -> Bounds:
    """Check the columns of a group, and return their bounds. Raises WireError."""
    _check_lengths(table)
    bounds = _check_values(table.columns)
    _check_finishes(table)
    _check_rewards(table)
    _check_optional(table)
    _check_teachers(table)
    _check_experts(table)
    _check_spans(table)
    return bounds


def _check_lengths(table: Table) -> None:
    columns = table.columns
    rollouts = len(table.responses)
    for name in _PER_ROLLOUT:
        if name in columns and len(columns[name]) != rollouts:
            raise WireError(
                f"at columns.{name}: {len(columns[name])} values for {rollouts} rollouts"
            )
    lengths = columns["lengths"].tolist()
    if min(lengths) < 0:
        raise WireError("at columns.lengths: a negative length")
    tokens = sum(lengths)
    for name in _PER_TOKEN:
        if name in columns and len(columns[name]) != tokens:
            raise WireError(
                f"at columns.{name}: {len(columns[name])} values for {tokens} response tokens"
            )


def _check_values(columns: Columns) -> Bounds:
    if min(columns["indices"].tolist()) < 0:
        raise WireError("at columns.indices: a negative value")
    if max(columns["statuses"].tobytes()) >= len(STATUSES):
        raise WireError(f"at columns.statuses: a value above {len(STATUSES) - 1}")
    for name in ("mask", "has_experts"):
        if name in columns and np.maximum.reduce(columns[name], initial=0) > 1:
            raise WireError(f"at columns.{name}: a value that is neither 0 nor 1")
    bounds = bounds_of(columns)
    for name, highest in (("prompt_ids", bounds.prompt_id), ("response_ids", bounds.response_id)):
        if highest >= 2**31:
            raise WireError(f"at columns.{name}: a negative value")
    if not math.isfinite(bounds.lowest_logprob) or not math.isfinite(bounds.highest_logprob):
        raise WireError("at columns.logprobs: a value that is NaN or infinite")
    return bounds


def _check_finishes(table: Table) -> None:
    finishes = table.columns.get("finishes")
    if finishes is None:
        if table.finish_reasons:
            raise WireError("at finish_reasons: the column finishes is missing")
        return
    used = set(finishes.tobytes()) - {NO_FINISH}
    if not used or max(used) >= len(table.finish_reasons):
        raise WireError(f"at columns.finishes: a value without a name in {table.finish_reasons}")


def _check_rewards(table: Table) -> None:
    rewards = table.columns.get("rewards")
    names = 0 if rewards is None else rewards.shape[1]
    if names != len(table.reward_names) or (rewards is not None and not names):
        raise WireError(f"at columns.rewards: {names} columns for {len(table.reward_names)} names")
    if rewards is None:
        return
    if len(rewards) != len(table.responses):
        raise WireError(
            f"at columns.rewards: {len(rewards)} rows for {len(table.responses)} rollouts"
        )
    # trainers compute with float32; NaN compares as False
    if any([abs(value) > _LARGEST for value in rewards.ravel().tolist()]):
        raise WireError(f"at columns.rewards: a value beyond {_LARGEST:.3g}, the range of float32")


def _check_spans(table: Table) -> None:
    spans = table.columns.get("spans")
    if spans is None:
        if table.lineages:
            raise WireError("at lineages: there are no spans")
        return
    if spans.shape[1] != 5 or not len(spans):
        raise WireError(f"at columns.spans: shape {list(spans.shape)}, expected [n, 5]")
    lengths = table.columns["lengths"].tolist()
    members = len(lengths)
    lineages = len(table.lineages)
    last = 0
    # a loop: a rollout has one span or a few, and every call of numpy costs as much as five of them
    for n, (rollout, start, length, version, lineage) in enumerate(spans.tolist()):
        if not (
            last <= rollout < members
            and start >= 0
            and 0 <= length <= lengths[rollout] - start
            and 0 <= version <= BIGGEST
            and 0 <= lineage < lineages
        ):
            raise _wrong_span(table, n, last)
        last = rollout


def _wrong_span(table: Table, n: int, last: int) -> WireError:
    """Return what is wrong with span n; `last`: the rollout of the span before."""
    span = table.columns["spans"][n].tolist()
    where = f"at columns.spans.{n}: {span}"
    lengths = table.columns["lengths"].tolist()
    if min(span) < 0 or max(span) > BIGGEST:
        return WireError(f"{where} has a value below 0 or from 2^53 on")
    if span[0] >= len(lengths):
        return WireError(f"{where} has a rollout that is none of {len(lengths)}")
    if span[4] >= len(table.lineages):
        return WireError(f"{where} has a lineage that is none of {len(table.lineages)}")
    if span[0] < last:
        return WireError(f"{where}: rollouts are not in order")
    return WireError(f"{where} is outside of {lengths[span[0]]} tokens")


def _check_optional(table: Table) -> None:
    for name in _OPTIONAL:
        if name in table.columns:
            _check_whole(name, table.columns[name], table.columns["lengths"].tolist())


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


def _check_teachers(table: Table) -> None:
    column = table.columns.get("teacher_logprobs")
    rows = 0 if column is None else len(column)
    if rows != len(table.teachers) or (column is not None and not rows):
        raise WireError(
            f"at columns.teacher_logprobs: {rows} rows for {len(table.teachers)} teachers"
        )
    if column is None:
        return
    lengths = table.columns["lengths"].tolist()
    if column.shape[1] != sum(lengths):
        raise WireError(
            f"at columns.teacher_logprobs: {column.shape[1]} values for {sum(lengths)} tokens"
        )
    for row in column:
        _check_whole("teacher_logprobs", row, lengths)


def _check_experts(table: Table) -> None:
    columns = table.columns
    experts = columns.get("routed_experts")
    inline = columns.get("has_experts")
    if experts is None and inline is None:
        return
    if experts is None or inline is None or not inline.any():
        raise WireError("at columns: routed_experts and has_experts need each other")
    if min(experts.shape) < 1:
        raise WireError(f"at columns.routed_experts: shape {list(experts.shape)}")
    prompt = len(columns["prompt_ids"])
    lengths = columns["lengths"].tolist()
    positions = np.flatnonzero(inline).tolist()
    rows = sum(expert_rows(prompt, lengths[n]) for n in positions)
    if len(experts) != rows:
        raise WireError(f"at columns.routed_experts: {len(experts)} rows, its rollouts have {rows}")
    if any(n in table.own and table.own[n].routed_experts is not None for n in positions):
        raise WireError("at own: routed_experts of a rollout that has rows of the column")
    if np.minimum.reduce(experts, axis=None) < 0:
        raise WireError("at columns.routed_experts: a negative expert")
