"""Functions of every kind that do what their argument says; processes import this module by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from rolloutmq import Answer


class Unknown(BaseException):
    """No Exception, so `except Exception` does not catch it."""


class Mute(Exception):
    """Has no text: making it raises, and so does its representation."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Leaving(Exception):
    def __str__(self) -> str:
        sys.exit(4)


class Odd(float):
    def __float__(self) -> float:
        raise Unknown


def throw(error: BaseException) -> Callable[[], Any]:
    def deed() -> Any:
        raise error

    return deed


def endless() -> Any:
    made: list[Any] = []
    made.append(made)
    return made


RAISED: dict[str, Callable[[], Any]] = {
    "SystemExit": lambda: sys.exit(2),
    "KeyboardInterrupt": throw(KeyboardInterrupt()),
    "StopIteration": lambda: next(iter(())),
    "StopAsyncIteration": throw(StopAsyncIteration()),
    "GeneratorExit": throw(GeneratorExit()),
    "CancelledError": throw(asyncio.CancelledError()),
    "TimeoutError": throw(TimeoutError()),
    "Unknown": throw(Unknown()),
    "Mute": throw(Mute()),
    "Leaving": throw(Leaving()),
    "RuntimeError": throw(RuntimeError("half of a surrogate \ud800")),
    "MemoryError": lambda: bytearray(1 << 50),
    "RecursionError": lambda: RAISED["RecursionError"](),
}
"""Deeds by the name of what is raised."""

ENDS: dict[str, Callable[[], Any]] = {
    "exit code 3": lambda: os._exit(3),
    "SIGSEGV": lambda: ctypes.string_at(0),
}
"""Deeds by how their process ends."""

HANGS: dict[str, Callable[[], Any]] = {
    "sleeps": lambda: time.sleep(1000),
    # sleeps in C, with the interpreter's lock
    "locks": lambda: ctypes.PyDLL(None).sleep(1000),
}

RUBBISH: dict[str, Callable[[], Any]] = {
    "object": object, "function": lambda: throw, "surrogate": lambda: {"score": 1.0, "\ud800": 1.0},
    "endless": endless, "nan": lambda: {"score": float("nan")}, "odd": lambda: Odd(1.0),
    "huge": lambda: {"score": 10**400},
}  # fmt: skip

WAITS = {"waits": lambda: time.sleep(15)}
"""A hang that ends, where it is in a thread of the test's own process."""

DEEDS = RAISED | ENDS | HANGS | RUBBISH


def do(deed: Any, good: Any) -> Any:
    found = (DEEDS | WAITS).get(deed)
    return found() if found else good


def judge(*, ground_truth: str, **_: Any) -> Any:
    return do(ground_truth, 1.0)


async def judge_later(*, ground_truth: str, **_: Any) -> Any:
    return do(ground_truth, 1.0)


def keep(states: list[Any]) -> Any:
    return do(states[0].ground_truth, True)


def tool(deed: str) -> Any:
    """Do something."""
    return do(deed, "well done")


async def tool_later(deed: str) -> Any:
    """Do something."""
    return do(deed, "well done")


class World:
    async def answer(self, state: Any, turn: Any) -> Any:
        good = Answer([{"role": "user", "content": turn.text}], reward={"score": 1.0})
        return do(state.ground_truth, good)


def agent(task: Any) -> Any:
    return do(task.ground_truth, {"score": 1.0})


async def agent_later(task: Any) -> Any:
    return do(task.ground_truth, {"score": 1.0})


def rows(answers: list[str]) -> list[Any]:
    return [{"question": "?", "answer": answer} for answer in answers]


def record(row: dict[str, Any]) -> Any:
    return do(row["answer"], row)


def go_on(completed: int, wanted: int, *, progress: Any) -> Any:
    return do(progress.stopped, True)
