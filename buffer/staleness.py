"""Staleness arithmetic, in one place (design section 9; the reference is XTuner's `calculate_seq_staleness`).

M is the version of the oldest token of a group, T the train step that consumes it. Since T moves for all
groups at once, pools are scored by M and nothing is ever rewritten when a step passes.
"""

from __future__ import annotations


def staleness(step: int, oldest_version: int) -> int:
    """T - M_oldest - 1: 0 is fully on-policy; negative when evaluated ahead of its step."""
    return step - oldest_version - 1


def stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """The first staleness that is too old: (max_staleness + 1) * interval."""
    return (max_staleness + 1) * sync_weights_interval


def freshness_cut(step: int, threshold: int) -> int:
    """The oldest version M that step T may still consume: staleness(T, M) < threshold."""
    return step - threshold


def last_step_for(version: int, threshold: int) -> int:
    """The last train step that weights M may still serve; producing further would only make waste."""
    return version + threshold
