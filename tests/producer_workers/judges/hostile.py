"""Functions of a user that do what `ground_truth` says; processes import this module by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from typing import Any

from buffer.wire.rollout import RolloutState


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


DEEDS: dict[str, Any] = {
    "pid": os.getpid,
    "hang": lambda: time.sleep(1000),
    # sleeps in C, with the interpreter's lock
    "lock": lambda: ctypes.PyDLL(None).usleep(10_000_000),
    "exit": lambda: os._exit(3),
    "crash": crash,
    "sys.exit": lambda: sys.exit(2),
    "StopIteration": lambda: next(iter(())),
    "memory": lambda: bytearray(1 << 40),
    "nan": lambda: float("nan"),
    # which would outlive its process
    "child": lambda: os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000"),
}


def score(*, response: str, ground_truth: Any, state: RolloutState) -> Any:
    """Do what a rollout asks for."""
    if ground_truth == "tokens":
        return float(state.response_ids.sum() + len(state.messages) + state.index)
    return DEEDS.get(ground_truth, lambda: 1.0)()


def rank(states: list[RolloutState]) -> list[float]:
    """Rank by length."""
    return [float(len(state.response)) for state in states]


def keep(states: list[RolloutState]) -> Any:
    """Keep a group whose scores differ."""
    return len({state.reward["score"] for state in states if state.reward}) > 1


async def score_later(*, ground_truth: Any, **given: Any) -> Any:
    """Do the same in a coroutine."""
    if ground_truth == "wait":
        await asyncio.sleep(1000)
    if ground_truth == "soon":
        await asyncio.sleep(0.2)
        return os.getpid()
    return score(ground_truth=ground_truth, **given)
