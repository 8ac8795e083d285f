"""A judge of your own: `judge = "my_judge:score"` in the config names it."""

from __future__ import annotations


def score(response: str, label: str) -> float:
    """Return 1 where the answer ends in the label."""
    return float(response.rstrip().endswith(label))
