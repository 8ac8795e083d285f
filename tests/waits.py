"""Wait for what threads and processes do beside a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from subprocess import Popen
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 400.0
"""A bound on failures: no test says how long something may take."""

PAUSE_S = 0.01


def nothing() -> str:
    return ""


def until(
    condition: Callable[[], T],
    what: str = "what a test waits for",
    over: Callable[[], str] = nothing,
    said: Callable[[], str] = nothing,
) -> T:
    """Wait until something is so, and return what `condition` returned.

    `over` returns why it can no longer become so, "" while it can: the wait then fails at once.
    `said` returns what the failure of a wait should show.
    """
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        why = over() or ("" if time.monotonic() < end else f"{DEADLINE_S:g} s have passed")
        # once more: it may have become so just before the end
        if why and not (found := condition()):
            raise AssertionError(f"{what} never came: {why}\n{said()}")
        if found:
            break
        time.sleep(PAUSE_S)
    return found


def end_of(process: Popen[bytes] | Popen[str] | BaseProcess) -> str:
    code = process.exitcode if isinstance(process, BaseProcess) else process.poll()
    return "" if code is None else f"process {process.pid} ended with {code}"
