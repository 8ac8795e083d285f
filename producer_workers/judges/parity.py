"""A reward for checks of the machinery: models with random weights solve nothing, and equal rewards teach nothing."""

from __future__ import annotations

from typing import Any

from buffer.rollout import RolloutState


def parity(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    """1.0 where the token ids of the response add up to an odd number, else 0.0."""
    return float(int(state.response_ids.sum()) % 2)
