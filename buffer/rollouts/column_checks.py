"""Checks the columns of groups against each other, before anything uses them.

Long columns are checked where they lie; short ones of many groups are joined first, because numpy
takes as long for eight values as for a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.rollouts.rollout import expert_rows
from buffer.rollouts.table import NO_FINISH, STATUSES, Table
from buffer.rollouts.wire_columns import Columns

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


def check_columns(tables: Sequence[Table]) -> list[Bounds]:
    """Check the columns of some groups, and return their bounds.

    Raises WireError; of one group, it names the value.
    """
    found = []
    for table in tables:
        _check_lengths(table)
        found.append(_check_values(table.columns))
        _check_finishes(table)
        _check_optional(table)
        _check_teachers(table)
        _check_experts(table)
    _check_rewards(tables)
    _check_spans(tables)
    return found


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


def _check_rewards(tables: Sequence[Table]) -> None:
    given = []
    for table in tables:
        rewards = table.columns.get("rewards")
        names = 0 if rewards is None else rewards.shape[1]
        if names != len(table.reward_names) or (rewards is not None and not names):
            raise WireError(
                f"at columns.rewards: {names} columns for {len(table.reward_names)} names"
            )
        if rewards is None:
            continue
        if len(rewards) != len(table.responses):
            raise WireError(
                f"at columns.rewards: {len(rewards)} rows for {len(table.responses)} rollouts"
            )
        given.append(rewards.reshape(-1))
    # trainers compute with float32
    if given and np.fmax.reduce(np.abs(_concatenate(given))) > _LARGEST:
        raise WireError(f"at columns.rewards: a value beyond {_LARGEST:.3g}, the range of float32")


def _check_spans(tables: Sequence[Table]) -> None:
    for table in tables:
        if "spans" not in table.columns:
            if table.lineages:
                raise WireError("at lineages: there are no spans")
        else:
            shape = table.columns["spans"].shape
            if shape[1] != 5 or not shape[0]:
                raise WireError(f"at columns.spans: shape {list(shape)}, expected [n, 5]")
    given = [table for table in tables if "spans" in table.columns]
    if given:
        _check_rows(given)


def _check_rows(tables: Sequence[Table]) -> None:
    """Check the spans of groups that have some."""
    spans = _joined(tables, "spans")
    rows = [len(table.columns["spans"]) for table in tables]
    members = [len(table.responses) for table in tables]
    lineages = [len(table.lineages) for table in tables]
    highest = np.maximum.reduce(spans).tolist()
    if np.minimum.reduce(spans, axis=None) < 0 or max(highest) >= 2**53:
        raise WireError("at columns.spans: a value below 0 or from 2^53 on")
    rollout = spans[:, 0]
    if _reaches(rollout, highest[0], members, rows):
        raise WireError(f"at columns.spans: a rollout that is none of {members[0]}")
    if _reaches(spans[:, 4], highest[4], lineages, rows):
        raise WireError(f"at columns.spans: a lineage that is none of {lineages[0]}")
    if len(tables) > 1:
        rollout = rollout + np.repeat([0, *accumulate(members[:-1])], rows)
    order = rollout.tolist()
    if sorted(order) != order:
        raise WireError("at columns.spans: rollouts are not in order")
    lengths = _joined(tables, "lengths").take(rollout)
    outside = spans[:, 1] + spans[:, 2] > lengths
    if outside.any():
        n = int(outside.argmax())
        raise WireError(
            f"at columns.spans.{n}: {spans[n].tolist()} is outside of {int(lengths[n])} tokens"
        )


def _reaches(
    column: NDArray[np.int64], highest: int, limits: Sequence[int], rows: Sequence[int]
) -> bool:
    """Return whether a value of a group is not below the limit of its group.

    `highest`: the largest value of the column. `rows`: of each group.
    """
    if len(limits) == 1:
        return highest >= limits[0]
    return bool((column >= np.repeat(limits, rows)).any())


def _joined(tables: Sequence[Table], name: str) -> NDArray[Any]:
    return _concatenate([table.columns[name] for table in tables])


def _concatenate(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


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
