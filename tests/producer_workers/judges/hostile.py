"""Functions of a user that do what `ground_truth` says; processes import this module by name."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from buffer.wire.rollout import RolloutState

DEEDS: dict[str, Any] = {
    "pid": os.getpid,
    "hang": lambda: time.sleep(1000),
    "memory": lambda: bytearray(1 << 40),
    # which would outlive its process
    "child": lambda: os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000"),
}


def score(*, response: str, ground_truth: Any, state: RolloutState) -> Any:
    if ground_truth == "tokens":
        return float(state.response_ids.sum() + len(state.messages) + state.index)
    return DEEDS.get(ground_truth, lambda: 1.0)()


def rank(states: list[RolloutState]) -> list[float]:
    return [float(len(state.response)) for state in states]


async def score_later(*, ground_truth: Any, **given: Any) -> Any:
    """Do the same in a coroutine."""
    if ground_truth == "wait":
        await asyncio.sleep(1000)
    if ground_truth == "soon":
        await asyncio.sleep(0.2)
        return os.getpid()
    return score(ground_truth=ground_truth, **given)
