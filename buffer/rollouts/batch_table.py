"""All rollouts of a batch as one table: the columns of its groups one after another, and offsets.

Trainers compute with these columns; no step between the wire and the device makes an object for a
rollout or a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.rollouts.group import RolloutGroup

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchTable:
    """The S rollouts of some groups, with P prompt tokens and R response tokens in total.

    Rollout n has the prompt tokens from `prompt_starts[n]` on, and the response tokens from
    `starts[n]` on. Rollouts of a group share their prompt.

    Usage:

        table = batch.table
        first = table.response_ids[table.starts]    # of every rollout that has tokens
    """

    groups: Sequence[RolloutGroup]
    group: Ints
    """int64[S]: position in `groups`"""
    prompt_ids: NDArray[np.int32]
    """int32[P]"""
    prompt_starts: Ints
    """int64[S]"""
    prompt_lengths: Ints
    """int64[S]"""
    response_ids: NDArray[np.int32]
    """int32[R]"""
    logprobs: NDArray[np.float32]
    """float32[R]"""
    mask: NDArray[np.uint8]
    """uint8[R]: 1 where a token is trained"""
    starts: Ints
    """int64[S]"""
    lengths: Ints
    """int64[S]"""
    optional: dict[str, NDArray[np.float32]]
    """float32[R] each: the columns of `RolloutGroup.optional_columns` that any group has; nan for
    the tokens of a rollout without"""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> BatchTable:
        """Return the table of these groups, in their order.

        Raises WireError where the columns of a group disagree.
        """
        for group in groups:
            _check_lengths(group)
        rollouts = np.array([len(group) for group in groups], np.int64)
        prompt_lengths = np.array([len(group.prompt_ids) for group in groups], np.int64)
        lengths = _joined([group.lengths for group in groups], np.int64)
        return cls(
            groups=groups,
            group=np.repeat(np.arange(len(groups)), rollouts),
            prompt_ids=_joined([group.prompt_ids for group in groups], np.int32),
            prompt_starts=np.repeat(_starts(prompt_lengths), rollouts),
            prompt_lengths=np.repeat(prompt_lengths, rollouts),
            response_ids=_joined([group.response_ids for group in groups], np.int32),
            logprobs=_joined([group.logprobs for group in groups], np.float32),
            mask=_joined([group.mask for group in groups], np.uint8),
            starts=_starts(lengths),
            lengths=lengths,
            optional=_optional(groups),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def totals(self) -> Ints:
        """Return the number of tokens of prompt and response of each rollout, int64[S]."""
        return self.prompt_lengths + self.lengths

    @property
    def trained(self) -> Ints:
        """Return the number of trained tokens of each rollout, int64[S]."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.mask, dtype=np.int64)])
        counts: Ints = before[self.starts + self.lengths] - before[self.starts]
        return counts

    @property
    def scores(self) -> NDArray[np.float32]:
        """Return `reward["score"]` of each rollout, float32[S]; nan without one."""
        return _joined([group.scores for group in self.groups], np.float32)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of `arange(start, start + length)` of every pair."""
    found: Ints = np.repeat(starts - _starts(lengths), lengths)
    found += np.arange(len(found))
    return found


def _optional(groups: Sequence[RolloutGroup]) -> dict[str, NDArray[np.float32]]:
    given = [group.optional_columns() for group in groups]
    return {
        name: _joined(
            [
                columns[name] if name in columns else np.full(len(group.response_ids), np.nan)
                for group, columns in zip(groups, given, strict=True)
            ],
            np.float32,
        )
        for name in sorted({name for columns in given for name in columns})
    }


def _check_lengths(group: RolloutGroup) -> None:
    tokens = int(group.lengths.sum())
    found = {name: len(getattr(group, name)) for name in ("response_ids", "logprobs", "mask")}
    wrong = {name: size for name, size in found.items() if size != tokens}
    if wrong:
        raise WireError(f"group {group.gid}: lengths add up to {tokens} tokens, but {wrong}")


def _starts(lengths: Ints) -> Ints:
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


def _joined(columns: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    if not columns:
        return np.empty(0, dtype)
    return np.concatenate(columns, dtype=dtype, casting="same_kind")
