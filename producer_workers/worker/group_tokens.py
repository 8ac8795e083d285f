"""Counts what an engine sampled for each group that is held, and by which weights.

An agent loop may discard tokens, or hold them back until a session ends; these counts know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from buffer.model.job import EndedEarly
from buffer.rollouts.rollout import PolicyVersion, RolloutState, VersionSpan, has_ended
from producer_workers.engines.base import Generation


@dataclass(slots=True)
class Sampled:
    """What was sampled for a group since its claim.

    `began`: the weights at its first request; the first token may be of later ones, if the request
    waited in the engine. `oldest`: the oldest version of each lineage, of requests that ended.
    """

    began: PolicyVersion
    tokens: int = 0
    oldest: dict[str, int] = field(default_factory=dict)


class GroupTokens:
    """The counts of one engine, by gid. `began` may be called on any thread."""

    def __init__(self) -> None:
        self._groups: dict[str, Sampled] = {}

    def begin(self, gid: str, weights: PolicyVersion) -> None:
        """Note a request of a group."""
        self._groups.setdefault(gid, Sampled(weights))

    def add(self, gid: str, made: Generation) -> None:
        """Count what a request returned."""
        if sampled := self._groups.get(gid):
            sampled.tokens += len(made.token_ids)
            _lower(sampled.oldest, made.spans)

    def began(self, gid: str) -> PolicyVersion | None:
        """Return the weights at the first request of a group; None before it."""
        sampled = self._groups.get(gid)
        return sampled.began if sampled else None

    def forget(self, gid: str) -> None:
        """Drop the counts of a group that has ended."""
        self._groups.pop(gid, None)

    def ended_early(
        self, gid: str, known_tokens: int, states: Sequence[RolloutState]
    ) -> EndedEarly:
        """Return what a group has that is ended early.

        `known_tokens`: it had when it was claimed. `states`: as its agent loop left them.
        """
        sampled = self._groups.get(gid)
        tokens = known_tokens + (sampled.tokens if sampled else 0)
        oldest = dict(sampled.oldest) if sampled else {}
        _lower(oldest, (span for state in states for span in state.spans))
        in_ended = sum(len(state.response_ids) for state in states if has_ended(state))
        most = sum(state.sample_params.max_tokens for state in states if not has_ended(state))
        return EndedEarly(tokens, max(0, most - (tokens - in_ended)), oldest)


def _lower(oldest: dict[str, int], spans: Iterable[VersionSpan]) -> None:
    """Lower the oldest version of each lineage to those of `spans`."""
    for span in spans:
        if span.length:
            oldest[span.lineage] = min(span.version, oldest.get(span.lineage, span.version))
