"""Compute the staleness of groups and tokens, as XTuner's `calculate_seq_staleness` does.

M is the version of the oldest token of a group, T the train step that consumes it. Pools are scored
by M, so that a train step, which changes T for all, rewrites nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError
from buffer.wire.rollout import RolloutState, VersionSpan


def staleness(step: int, oldest_version: int) -> int:
    """Return T - M_oldest - 1: 0 is fully on-policy, negative is ahead of its step."""
    return step - oldest_version - 1


def next_step(taken: int, awaits: int) -> int:
    """Return the train step to generate for, as `steps.lua`: `awaits` (0: none), or the next."""
    return min(awaits, taken + 1) or taken + 1


def stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """Return the staleness, in train steps, from which a group is expired."""
    return (max_staleness + 1) * sync_weights_interval


def max_staleness(threshold: int, sync_weights_interval: int) -> int:
    """Return the inverse of `stale_threshold`."""
    return threshold // sync_weights_interval - 1


def last_step_for(version: int, threshold: int) -> int:
    return version + threshold


def living_version(forks: Sequence[tuple[str, int]], lineage: str, version: int) -> int:
    """Return M, at most the first step of each fork (lineage, step) after `lineage` (I8)."""
    names = [name for name, _ in forks]
    after = len(names) - names[::-1].index(lineage) if lineage in names else 0
    return min([version, *(step for _, step in forks[after:])])


def last_trained(mask: NDArray[np.uint8], spans: Iterable[VersionSpan]) -> VersionSpan | None:
    """Return the span whose version decides when a rollout has no token left to train.

    None, so that it never expires by token, if a trained token has no version or none is trained.
    """
    trained = [s for s in spans if mask[s.start : s.start + s.length].any()]
    covered = sum(int(mask[s.start : s.start + s.length].sum()) for s in trained)
    if not trained or covered < mask.sum():
        return None
    lineage = max(trained).lineage
    return max((s for s in trained if s.lineage == lineage), key=lambda s: s.version)


def ages(found: Mapping[str, Mapping[str, int]]) -> str:
    """Return versions by what they are and by lineage of weights, as scripts read them."""
    rows = ((what, *pair) for what, versions in found.items() for pair in versions.items())
    return ",".join(f"{what} {lineage} {version}" for what, lineage, version in rows)


@dataclass(frozen=True, slots=True)
class AgeLimit:
    """Which members of a group are too old for the next train step, as in the pools (I8).

    `cut`: the lowest score that is not too old. `lag`: how many steps earlier a token expires.
    """

    cut: int
    lag: int | None
    forks: Sequence[tuple[str, int]]

    def is_too_old(self, state: RolloutState) -> bool:
        versions = [self._living(span) for span in state.spans if span.length]
        if self.lag is not None and (last := last_trained(state.whole_mask(), state.spans)):
            versions.append(self._living(last) - self.lag)
        return min(versions, default=self.cut) < self.cut

    def _living(self, span: VersionSpan) -> int:
        return living_version(self.forks, span.lineage, span.version)


def token_mask(
    mask: NDArray[np.uint8] | None,
    tokens: int,
    spans: Iterable[VersionSpan],
    step: int,
    token_threshold: int | None,
) -> NDArray[np.uint8] | None:
    """Return which tokens of a response step T trains, uint8[tokens]: the fresh ones in `mask`.

    A token is fresh while T - M - 1 < `token_threshold`; a tool's token does not age. All zeros:
    the rollout has expired. None without a threshold, a token, or a token in `mask`. The caller
    clamps versions of weights from abandoned lineages (`living_version`).
    """
    if token_threshold is None:
        return None
    if token_threshold < 1:
        raise ConfigError(
            f"the token threshold is {token_threshold}", hint="set at least 1 step, or None"
        )
    if not tokens or (mask is not None and not mask.any()):
        return None
    fresh = np.ones(tokens, "u1") if mask is None else mask.copy()
    for span in spans:
        if staleness(step, span.version) >= token_threshold:
            fresh[span.start : span.start + span.length] = 0
    return fresh
