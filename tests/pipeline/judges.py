"""Judges for runs whose engine makes random tokens: by configuration as
"tests.pipeline.judges:by_chance".
"""

from __future__ import annotations

from zlib import crc32

from buffer.model.rollout import RolloutState


def by_chance(*, response: str, ground_truth: object, state: RolloutState) -> float:
    """1 or 0, by the tokens of the response alone: a group has both, so there is something to
    learn.
    """
    return float(crc32(state.response_ids.tobytes()) % 2)
