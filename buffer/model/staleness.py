"""Staleness arithmetic, in one place (design section 9; the reference is XTuner's
`calculate_seq_staleness`).

M is the version of the oldest token of a group, T the train step that consumes it. Since T moves
for all groups at once, pools are scored by M and nothing is ever rewritten when a step passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError
from buffer.model.rollout import VersionSpan


def staleness(step: int, oldest_version: int) -> int:
    """T - M_oldest - 1: 0 is fully on-policy; negative when evaluated ahead of its step."""
    return step - oldest_version - 1


def stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """The first staleness that is too old: (max_staleness + 1) * interval."""
    return (max_staleness + 1) * sync_weights_interval


def last_step_for(version: int, threshold: int) -> int:
    """The last train step that weights M may still serve; producing further would only make waste."""
    return version + threshold


def living_version(forks: Sequence[tuple[str, int]], lineage: str, version: int) -> int:
    """M as it counts (I8): no later than any of the `forks` (lineage, its first step) after the
    lineage.
    """
    names = [name for name, _ in forks]
    after = len(names) - names[::-1].index(lineage) if lineage in names else 0
    return min([version, *(step for _, step in forks[after:])])


def token_mask(
    mask: NDArray[np.uint8] | None,
    tokens: int,
    spans: Iterable[VersionSpan],
    step: int,
    token_threshold: int | None,
) -> NDArray[np.uint8] | None:
    """uint8[tokens]: which tokens of a response step T trains: those in `mask` that are fresh by
    themselves.

    A token is fresh while T - M - 1 < `token_threshold` (`stale_threshold` of max_token_staleness),
    M being the version that made it; one that no policy made (a tool's) does not age. All zeros:
    the rollout has expired. None where it does not apply: no threshold, no token, or none that was
    to be trained anyway. Versions of weights that a trainer forked away from are clamped by the
    caller (`living_version`).
    """
    if token_threshold is None:
        return None
    if token_threshold < 1:
        raise ConfigError(
            f"the token threshold is {token_threshold}", hint="at least 1 step, or none at all"
        )
    if not tokens or (mask is not None and not mask.any()):
        return None
    fresh = np.ones(tokens, "u1") if mask is None else mask.copy()
    for span in spans:
        if staleness(step, span.version) >= token_threshold:
            fresh[span.start : span.start + span.length] = 0
    return fresh
