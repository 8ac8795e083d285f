"""Checks what a document of the wire format says against itself, before anything uses it.

Types of values are checked while they are read (`wire_schema`). Here: values without a type of
their own, and columns against each other, in a few calls for all rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.rollouts.rollout import expert_rows
from buffer.rollouts.table import NO_FINISH, STATUSES, Table
from buffer.rollouts.wire_columns import Columns
from buffer.rollouts.wire_schema import Own, Sample, Shared

MAX_NESTING = 32
"""Deeper documents would exceed the recursion limit of other readers, and of our encoder."""

MAX_CONTAINERS = 2**18
"""Maps and arrays in one document: an empty map is one byte on the wire and 64 in memory."""

_HEAD_BYTES = 2**19
"""A head of this size cannot contain many more containers than allowed."""

_LARGEST = float(np.finfo("<f4").max)
_PLAIN = frozenset({dict, list, tuple, str, int, float, bool, type(None), bytes})
_PER_ROLLOUT = ("indices", "lengths", "statuses", "finishes", "has_experts")
_PER_TOKEN = ("response_ids", "logprobs", "mask", "ref_logprobs", "values", "token_rewards")
_OPTIONAL = ("ref_logprobs", "values", "token_rewards")


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


def check_table(table: Table) -> None:
    """Check a table whose values have the types of the format. Raises WireError."""
    _check_texts(table)
    _check_columns(table)


# -- texts ---------------------------------------------------------------


def _check_texts(table: Table) -> None:
    check_plain("shared", *_untyped(table.shared))
    last = -1
    for n, own in table.own.items():
        if not last < n < len(table.responses):
            raise WireError(f"at own: position {n} of {len(table.responses)} rollouts")
        check_plain(f"own.{n}", *_untyped(own))
        last = n
    for name in ("finish_reasons", "lineages", "reward_names", "teachers"):
        names = getattr(table, name)
        if len(set(names)) != len(names):
            raise WireError(f"at {name}: a name twice")


def _untyped(texts: Shared | Own) -> list[Any]:
    """Return the values that have no schema."""
    values: list[Any] = [texts.messages, texts.tools, texts.tool_choice, texts.extra]
    values.append(texts.ground_truth)
    if isinstance(texts.sample, Sample) and texts.sample.structured is not None:
        values.append(texts.sample.structured.json_schema)
    if isinstance(texts, Own):
        values = [value for value in values if value is not UNSET]
        values += [call.arguments for call in texts.tool_calls]
    return values


def check_plain(where: str, *values: Any) -> None:
    """Raise WireError for values of other types than msgpack's, or nested too deeply.

    `where`: named in the error.
    """
    for level in _levels(where, values):
        for item in level:
            kind = type(item)
            if kind is dict and not all(type(key) is str for key in item):
                raise WireError(f"at {where}: a key that is not a text")
            if kind not in _PLAIN:
                raise WireError(f"at {where}: {kind.__name__} is not part of the format")


def check_nesting(where: str, *values: Any) -> None:
    """Raise WireError for maps and arrays that are nested too deeply."""
    for _ in _levels(where, values):
        pass


def _levels(where: str, values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the values, what they contain, what that contains, and so on."""
    level = list(values)
    for _ in range(MAX_NESTING):
        if not level:
            return
        yield level
        maps = (value for item in level if type(item) is dict for value in item.values())
        arrays = (value for item in level if type(item) in (list, tuple) for value in item)
        level = [*maps, *arrays]
    if level:
        raise WireError(
            f"at {where}: maps and arrays are nested too deeply",
            hint=f"at most {MAX_NESTING} levels",
        )


# -- columns -------------------------------------------------------------


def _check_columns(table: Table) -> None:
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
    _check_values(columns)
    _check_finishes(table)
    _check_rewards(table)
    if "spans" in columns:
        _check_spans(columns["spans"], columns["lengths"], len(table.lineages))
    elif table.lineages:
        raise WireError("at lineages: there are no spans")
    for name in _OPTIONAL:
        if name in columns:
            _check_optional(name, columns[name], lengths)
    _check_teachers(table, lengths)
    _check_experts(table, lengths)


def _check_values(columns: Columns) -> None:
    # ufuncs, because the methods of arrays call them through two functions in Python
    for name in ("indices", "prompt_ids", "response_ids"):
        if np.minimum.reduce(columns[name], initial=0) < 0:
            raise WireError(f"at columns.{name}: a negative value")
    if max(columns["statuses"].tobytes()) >= len(STATUSES):
        raise WireError(f"at columns.statuses: a value above {len(STATUSES) - 1}")
    for name in ("mask", "has_experts"):
        if name in columns and np.maximum.reduce(columns[name], initial=0) > 1:
            raise WireError(f"at columns.{name}: a value that is neither 0 nor 1")
    logprobs = columns["logprobs"]
    # the sum of squares is finite only if all values are; it overflows for some that are
    if not np.isfinite(np.dot(logprobs, logprobs)) and not np.isfinite(logprobs).all():
        raise WireError("at columns.logprobs: a value that is NaN or infinite")


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
    # trainers compute with float32
    if np.fmax.reduce(np.abs(rewards), axis=None) > _LARGEST:
        raise WireError(f"at columns.rewards: a value beyond {_LARGEST:.3g}, the range of float32")


def _check_spans(spans: NDArray[np.int64], lengths: NDArray[np.int32], lineages: int) -> None:
    if spans.shape[1] != 5 or not len(spans):
        raise WireError(f"at columns.spans: shape {list(spans.shape)}, expected [n, 5]")
    highest = np.maximum.reduce(spans).tolist()
    if np.minimum.reduce(spans, axis=None) < 0 or max(highest) >= 2**53:
        raise WireError("at columns.spans: a value below 0 or from 2^53 on")
    rollout = spans[:, 0]
    if highest[0] >= len(lengths) or (rollout[1:] < rollout[:-1]).any():
        raise WireError(f"at columns.spans: rollouts are not in order, or none of {len(lengths)}")
    if highest[4] >= lineages:
        raise WireError(f"at columns.spans: a lineage that is none of {lineages}")
    outside = spans[:, 1] + spans[:, 2] > lengths[rollout]
    if outside.any():
        n = int(outside.argmax())
        raise WireError(
            f"at columns.spans.{n}: {spans[n].tolist()} is outside of "
            f"{int(lengths[rollout[n]])} tokens"
        )


def _check_optional(name: str, column: NDArray[Any], lengths: Sequence[int]) -> None:
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


def _check_teachers(table: Table, lengths: Sequence[int]) -> None:
    column = table.columns.get("teacher_logprobs")
    rows = 0 if column is None else len(column)
    if rows != len(table.teachers) or (column is not None and not rows):
        raise WireError(
            f"at columns.teacher_logprobs: {rows} rows for {len(table.teachers)} teachers"
        )
    if column is None:
        return
    if column.shape[1] != sum(lengths):
        raise WireError(
            f"at columns.teacher_logprobs: {column.shape[1]} values for {sum(lengths)} tokens"
        )
    for row in column:
        _check_optional("teacher_logprobs", row, lengths)


def _check_experts(table: Table, lengths: Sequence[int]) -> None:
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
    positions = np.flatnonzero(inline).tolist()
    rows = sum(expert_rows(prompt, lengths[n]) for n in positions)
    if len(experts) != rows:
        raise WireError(f"at columns.routed_experts: {len(experts)} rows, its rollouts have {rows}")
    if any(n in table.own and table.own[n].routed_experts is not None for n in positions):
        raise WireError("at own: routed_experts of a rollout that has rows of the column")
    if np.minimum.reduce(experts, axis=None) < 0:
        raise WireError("at columns.routed_experts: a negative expert")
