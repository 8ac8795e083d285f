"""The rewards of a group as estimators of advantages get them, with the overlong penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from msgspec import to_builtins
from numpy.typing import NDArray

from buffer.wire.group import RolloutGroup

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What advantages are computed from: a group of k rollouts with R response tokens in total."""

    scores: NDArray[np.float32]  # float32[k], with the overlong penalty
    lengths: NDArray[np.int32]  # int32[k]: response tokens
    sessions: Sequence[str]  # of the k rollouts: one session may have several
    roles: Sequence[str]  # of the k rollouts; an estimator gets those of one role
    rewards: Mapping[str, Floats]  # float64[k]: the numbers of the judge by name; nan: none
    tokens: dict[str, NDArray[Any]]  # [R]: mask, logprobs and `RolloutGroup.optional_columns`

    @classmethod
    def of(cls, group: RolloutGroup, overlong_buffer_tokens: int | None = None) -> GroupRewards:
        tokens: dict[str, NDArray[Any]] = {"mask": group.mask, "logprobs": group.logprobs}
        return cls(
            shaped_scores(group, overlong_buffer_tokens),
            group.lengths,
            group.sessions,
            group.roles,
            {name: group.columns["rewards"][:, n] for n, name in enumerate(group.head.rewards)},
            tokens | group.optional_columns(),
        )

    def lists(self, *, with_tokens: bool) -> dict[str, Any]:
        """Return a JSON value, for other ranks; nan becomes null."""
        sent = self if with_tokens else replace(self, tokens={})
        lists: dict[str, Any] = to_builtins(sent, enc_hook=np.ndarray.tolist)
        return lists

    @classmethod
    def of_lists(cls, lists: Mapping[str, Any]) -> GroupRewards:
        return cls(
            np.array(lists["scores"], np.float32),
            np.array(lists["lengths"], np.int32),
            lists["sessions"],
            lists["roles"],
            {name: np.array(column, np.float64) for name, column in lists["rewards"].items()},
            {name: np.array(column, np.float32) for name, column in lists["tokens"].items()},
        )

    def part(self, chosen: NDArray[np.bool_]) -> GroupRewards:
        """Return these rollouts alone; `chosen`: bool[k]."""
        tokens = np.repeat(chosen, self.lengths)
        return GroupRewards(
            self.scores[chosen],
            self.lengths[chosen],
            [*compress(self.sessions, chosen)],
            [*compress(self.roles, chosen)],
            {name: column[chosen] for name, column in self.rewards.items()},
            {name: column[tokens] for name, column in self.tokens.items()},
        )


def overlong_penalty(
    lengths: NDArray[np.int32], max_tokens: NDArray[np.int32], buffer_tokens: int
) -> NDArray[np.float32]:
    """Return the penalty of responses close to their token limit, float32[k], in [-1, 0].

    (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.) `lengths`, `max_tokens`: int32[k]. It is
    0 up to `max_tokens - buffer_tokens` and falls linearly to -1 at `max_tokens`.
    """
    over = np.asarray(lengths, np.float64) - (np.asarray(max_tokens, np.float64) - buffer_tokens)
    return (-np.clip(over / buffer_tokens, 0.0, 1.0)).astype(np.float32)


def shaped_scores(group: RolloutGroup, buffer_tokens: int | None) -> NDArray[np.float32]:
    """Return the scores with the overlong penalty, if there are `buffer_tokens`; float32[k]."""
    if buffer_tokens is None:
        return group.scores
    return group.scores + overlong_penalty(group.lengths, group.token_limits, buffer_tokens)
