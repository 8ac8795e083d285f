"""Judges for engines that make random tokens, in configs "tests.pipeline.judges:by_chance"."""

from __future__ import annotations

import os
from itertools import count
from zlib import crc32

from buffer.wire.rollout import RolloutState
from producer_workers.user_code.border import runs_inline


@runs_inline
def by_chance(*, response: str, ground_truth: object, state: RolloutState) -> float:
    """Return 1 or 0, by the tokens of the response alone.

    A group has both, so there is something to learn.
    """
    return float(crc32(state.response_ids.tobytes()) % 2)


DIES_AFTER = 32  # judged rollouts

_judged = count(1)


@runs_inline
def dies(*, response: str, ground_truth: object, state: RolloutState) -> float:
    """End its worker, again and again."""
    if next(_judged) == DIES_AFTER:
        os._exit(9)
    return by_chance(response=response, ground_truth=ground_truth, state=state)
