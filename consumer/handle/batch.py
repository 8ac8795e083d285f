"""What one train step consumes, and how the wait for it is interrupted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from buffer.control.task_status import ProduceBatchStatus
from buffer.errors import WireError
from buffer.manifest import Manifest
from buffer.wire.columns import known_column
from buffer.wire.group import RolloutGroup

Ints = NDArray[np.int64]

COLUMNS = ("prompt_ids", "response_ids", "logprobs", "mask")


class DeliveredGroups:
    """Groups of the newest batches, as long as the trainer holds them."""

    def __init__(self) -> None:
        # only the newest: a trainer may keep groups for good, for example to show them
        self._batches: deque[list[ref[RolloutGroup]]] = deque(maxlen=4)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        self._batches.append([ref(group) for group in groups])

    def clear(self) -> None:
        """Forget all groups: something else has compared them."""
        self._batches.clear()

    def check(self) -> None:
        """Raise GroupChanged unless all groups are what the server sent. Any thread may call it."""
        for held in [held for batch in list(self._batches) for held in batch]:
            if group := held():
                group.check_unchanged()


class Stopped(Exception):
    """`stop` was called, the run is finished, or the caller cancelled; nothing was taken."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one train step consumes.

    `status` EXPIRED_BATCH: the newest weights are too old for the next step; train, then publish.
    """

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest
    waited_s: float  # the trainer waited for this batch
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL

    @property
    def table(self) -> BatchTable:
        """Return the columns of all groups, joined at each access."""
        return BatchTable.of(self.groups)


_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


@contextmanager
def abandoned_by(event: threading.Event) -> Iterator[None]:
    """Interrupt the waits within this block once the event is set."""
    token = _abandoned.set(event)
    try:
        yield
    finally:
        _abandoned.reset(token)


def check_not_abandoned() -> None:
    """Raise Stopped if the caller no longer awaits the result."""
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise Stopped


@dataclass(frozen=True)
class BatchTable:
    """The S rollouts of some groups, with P prompt tokens and R response tokens in total.

    Rollout n has prompt tokens from `prompt_starts[n]` on (shared by its group), and response
    tokens from `starts[n]` on. Columns are joined at their first use: do not change the groups
    before.
    """

    groups: Sequence[RolloutGroup]
    group: Ints  # int64[S]: position in `groups`
    prompt_starts: Ints  # int64[S]
    prompt_lengths: Ints  # int64[S]
    starts: Ints  # int64[S]
    lengths: Ints  # int64[S]
    group_starts: Ints  # int64[S]: first response token in its own group's columns
    _columns: dict[str, list[NDArray[Any]]]  # `COLUMNS` of each group

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> BatchTable:
        """Return the table of these groups. Raises WireError where a group's columns disagree."""
        rollouts = np.array([len(group) for group in groups], np.int64)
        columns = {name: [getattr(group, name) for group in groups] for name in COLUMNS}
        prompt_lengths = _sizes(columns["prompt_ids"])
        lengths = _joined([group.lengths for group in groups], np.int64)
        group = np.repeat(np.arange(len(groups)), rollouts)
        tokens = np.bincount(group, lengths, len(groups)).astype(np.int64)
        for name in COLUMNS[1:]:
            found = _sizes(columns[name])
            if len(wrong := np.flatnonzero(found != tokens)):
                n = int(wrong[0])
                raise WireError(
                    f"group {groups[n].gid}: lengths add up to {tokens[n]} tokens, but {name} has "
                    f"{found[n]}"
                )
        starts = _starts(lengths)
        return cls(
            groups=groups,
            group=group,
            prompt_starts=_starts(prompt_lengths)[group],
            prompt_lengths=prompt_lengths[group],
            starts=starts,
            lengths=lengths,
            group_starts=starts - _starts(tokens)[group],
            _columns=columns,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def totals(self) -> Ints:
        """Return the tokens of prompt and response of each rollout, int64[S]."""
        return self.prompt_lengths + self.lengths

    @cached_property
    def trained(self) -> Ints:
        """Return the number of trained tokens of each rollout, int64[S]."""
        counts = np.zeros(len(self), np.int64)
        # reduceat adds from one start to the next one: rollouts without tokens have none
        filled = np.flatnonzero(self.lengths)
        starts = self.group_starts[filled]
        ends = np.searchsorted(self.group[filled], np.arange(len(self.groups) + 1)).tolist()
        # bytes are added the faster the smaller the type is
        dtype = np.min_scalar_type(self.lengths.max(initial=0))
        counts[filled] = _joined(
            [
                np.add.reduceat(mask, starts[first:end], dtype=dtype)
                for mask, (first, end) in zip(self.columns("mask"), pairwise(ends), strict=True)
            ],
            np.int64,
        )
        return counts

    @property
    def scores(self) -> NDArray[np.float32]:
        """Return `reward["score"]` of each rollout, float32[S]; nan without one."""
        return _joined([group.scores for group in self.groups], np.float32)

    @cached_property
    def prompt_ids(self) -> NDArray[np.int32]:
        """Token ids of all prompts, int32[P]."""
        return _joined(self.columns("prompt_ids"), np.int32)

    @cached_property
    def response_ids(self) -> NDArray[np.int32]:
        """Token ids of all responses, int32[R]."""
        return _joined(self.columns("response_ids"), np.int32)

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """Of all response tokens, float32[R]."""
        return _joined(self.columns("logprobs"), np.float32)

    @cached_property
    def mask(self) -> NDArray[np.uint8]:
        """1 where a token is trained, uint8[R]."""
        return _joined(self.columns("mask"), np.uint8)

    @cached_property
    def optional(self) -> dict[str, NDArray[Any]]:
        """The optional columns that any group has, [R] or [R, k]; nan: no value."""
        return {name: np.concatenate(self.columns(name)) for name in self.optional_names()}

    def optional_names(self) -> list[str]:
        return sorted({name for group in self.groups for name in group.optional_columns()})

    def columns(self, name: str) -> list[NDArray[Any]]:
        """Return a column of each group, not joined: one of `COLUMNS`, or an optional one.

        Values of several numbers, as a teacher's top tokens, are as wide as the widest.
        """
        if name in COLUMNS:
            return self._columns[name]
        column = known_column(name.partition("/")[0])
        given = [group.optional_columns().get(name) for group in self.groups]
        inner = [array.shape[1:] for array in given if array is not None]
        widest = tuple(map(max, zip(*inner, strict=True))) or (1,) * column.inner
        return [
            column.widened(array, (len(group.response_ids), *widest))
            for group, array in zip(self.groups, given, strict=True)
        ]

    def parts(self, columns: Sequence[NDArray[Any]], chosen: Ints) -> list[NDArray[Any]]:
        """Return each chosen rollout's part of its group's column of response tokens."""
        starts = self.group_starts[chosen]
        ends = starts + self.lengths[chosen]
        places = zip(self.group[chosen].tolist(), starts.tolist(), ends.tolist(), strict=True)
        return [columns[group][start:end] for group, start, end in places]


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of `arange(start, start + length)` of every pair."""
    found: Ints = np.repeat(starts - _starts(lengths), lengths)
    found += np.arange(len(found))
    return found


def _sizes(columns: Sequence[NDArray[Any]]) -> Ints:
    return np.array(list(map(len, columns)), np.int64)


def _starts(lengths: Ints) -> Ints:
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


def _joined(columns: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    if not columns:
        return np.empty(0, dtype)
    return np.concatenate(columns, dtype=dtype, casting="same_kind")
