"""Checks the columns of groups against each other, before anything uses them.

Numpy takes as long for eight values as for a thousand: what is short is checked in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.wire.columns import Columns
from buffer.wire.rollout import expert_rows
from buffer.wire.table import NO_FINISH, STATUSES, Table

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
