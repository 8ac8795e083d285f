"""Judges for rq that misbehave on purpose, and report in the folder `ground_truth`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from buffer.errors import Skip


def length(*, response: str, ground_truth: Any, state: Any) -> dict[str, float]:
    tokens = float(len(state.response_ids)) + (state.finish_reason == "length") / 2
    return {"score": float(len(response)), "messages": float(len(state.messages)), "tokens": tokens}


def ranks(*, states: list[Any]) -> list[float]:
    lengths = [len(state.response) for state in states]
    return [float(sorted(lengths).index(length)) for length in lengths]


def skips(*, response: str, **_: Any) -> float:
    raise Skip("no page")


def raises(*, response: str, **_: Any) -> float:
    return float(response)  # raises


def steps(*, response: str, ground_truth: Any, state: Any) -> dict[str, Any]:
    return {"score": 1, "token_rewards": state.response_ids / 2}


def hangs_once(*, response: str, ground_truth: str, state: Any) -> float:
    """Write the process id and wait to be killed; answer the second call."""
    calls = Path(ground_truth) / "pid"
    if calls.exists():
        return 1.0
    part = calls.with_suffix(".part")
    part.write_text(f"{os.getpid()} {os.getppid()}")
    part.rename(calls)
    time.sleep(3600)
    return 0.0


def ends_without_a_server(*, response: str, ground_truth: str, state: Any) -> float:
    """Say that it is called, and answer once somebody says that the server is away."""
    folder = Path(ground_truth)
    (folder / "called").touch()
    while not (folder / "away").exists():
        time.sleep(0.01)
    return 1.0


def spins(*, response: str, ground_truth: Any, state: Any) -> float:
    """Ignore rq's time limit, which Python must handle: stay in C and hold its lock."""
    return float(bool(re.match("(a+)+$", "a" * 60 + "b")))


def sleeps(*, response: str, ground_truth: Any, state: Any) -> float:
    time.sleep(3600)
    return 0.0


def eats(*, response: str, ground_truth: Any, state: Any) -> float:
    return float(len(bytearray(8 * 2**30)))
