"""The rewards of a group as estimators of advantages get them, by rollout and by session."""

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

FULL_SCORE = 1.0 - 1e-6
"""A rollout with this score or more is right; one with partial credit is not."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What advantages are computed from: a group of k rollouts with R response tokens in total.

    Of `tokens`, `mask` is 1 where a token was sampled to be trained, and `trained` where staleness
    or the batch filter have not cut it since. Estimators compare what was sampled, so they read
    `mask`.
    """

    scores: NDArray[np.float32]  # float32[k], with the overlong penalty
    lengths: NDArray[np.int32]  # int32[k]: response tokens
    sessions: Sequence[str]  # of the k rollouts: one session may have several
    roles: Sequence[str]  # of the k rollouts; an estimator gets those of one role
    rewards: Mapping[str, Floats]  # float64[k]: the numbers of the judge by name; nan: none
    # [R]: mask, trained, logprobs and `RolloutGroup.optional_columns` of one number
    tokens: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, group: RolloutGroup, overlong_buffer_tokens: int | None = None) -> GroupRewards:
        masks = {"mask": group.sampled_mask, "trained": group.mask}
        tokens: dict[str, NDArray[Any]] = masks | {"logprobs": group.logprobs}
        return cls(
            shaped_scores(group, overlong_buffer_tokens),
            group.lengths,
            group.sessions,
            group.roles,
            {name: group.columns["rewards"][:, n] for n, name in enumerate(group.head.rewards)},
            tokens | {name: own for name, own in group.optional_columns().items() if own.ndim == 1},
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

    @property
    def session(self) -> NDArray[np.intp]:
        """Return the session of each rollout, int[k], numbered from 0 in order."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(name, len(numbers)) for name in self.sessions], np.intp)

    @property
    def firsts(self) -> NDArray[np.intp]:
        """Return the first rollout of each session, int[sessions]."""
        return np.unique(self.session, return_index=True)[1]

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


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """The T tokens of a group that were sampled, session by session, and what turns were worth.

    The rollouts of a session are its segments, in order. Its tokens do not depend on how it is cut
    into segments, on the context that a segment repeats, or on what is masked later.
    """

    group: GroupRewards
    place: NDArray[np.intp]  # int[T]: position of the token among the R of the group
    session: NDArray[np.intp]  # int[T], ascending
    turn: NDArray[np.intp]  # int[T]: a run of sampled tokens of a segment, by number in its session
    rewards: Floats  # float64[T]: token_rewards of a token and of those behind it, up to the next

    @classmethod
    def of(cls, group: GroupRewards) -> SessionTokens:
        sampled = group.tokens["mask"] > 0
        starts = sampled & ~np.append(False, sampled[:-1])
        firsts = (np.cumsum(group.lengths) - group.lengths)[group.lengths > 0]
        starts[firsts] = sampled[firsts]
        every = np.repeat(group.session, group.lengths)
        order = np.argsort(every, kind="stable")
        place = order[sampled[order]]
        session = every[place]
        turns = np.cumsum(starts[place])
        is_first = np.diff(session, prepend=-1) > 0
        before = np.maximum.accumulate(np.where(is_first, turns, 0))
        # token rewards before the first sampled token of a session belong to no turn
        receiver = np.cumsum(sampled[order]) - 1
        given = np.nan_to_num(group.tokens.get("token_rewards", np.zeros(len(sampled))))[order]
        is_own = receiver >= 0
        is_own[is_own] = session[receiver[is_own]] == every[order][is_own]
        rewards = np.bincount(receiver[is_own], given[is_own], len(place)).astype(np.float64)
        return cls(group, place, session, turns - before, rewards)

    def outcomes(self) -> NDArray[np.float32]:
        """Return what each rollout's score adds to the rewards of its session's turns, float32[k].

        Where the score of every session is the sum of these rewards, it is their sum and counts
        once: only the overlong penalty is left of it.
        """
        group = self.group
        score = group.rewards.get("score", group.scores)
        of_turns = np.bincount(self.session, self.rewards, len(group.scores))[group.session]
        if not np.allclose(of_turns, score, rtol=1e-4, atol=1e-6):
            return group.scores
        return group.scores - np.asarray(score, np.float32)

    def column(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Return numbers of the T tokens as float32[R], 0 for the others."""
        column = np.zeros(len(self.group.tokens["mask"]), np.float32)
        column[self.place] = values
        return column


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
    """Return the scores with the overlong penalty, if there are `buffer_tokens`; float32[k].

    `max_tokens` limits a response, or what is sampled in all segments of an agent's session.
    """
    if buffer_tokens is None:
        return group.scores
    names, member = np.unique(group.sessions, return_inverse=True)
    sampled = group.sums(group.sampled_mask)
    of_session = np.bincount(member, sampled, len(names))[member].astype(np.int32)
    lengths = group.lengths.copy()
    for n, own in group.head.own:
        if own.session_id:
            lengths[n] = of_session[n]
    limits = np.array([sample.max_tokens for sample in group.samples], np.int32)
    return group.scores + overlong_penalty(lengths, limits, buffer_tokens)
