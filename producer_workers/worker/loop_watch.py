"""Log what blocks a worker's event loop, by the name of the judge, tool or agent where it is one.

While the loop is blocked, the worker samples, submits and pauses nothing. Its heartbeat continues
until `STUCK_S`: then its leases run out, and its groups go to other workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from types import FrameType

from producer_workers.user_code.user_function import LAST_CALLS, attempt, outcome_of

log = logging.getLogger("rolloutmq.worker")

BLOCKED_S = 2.0
"""Time without a turn of the loop that is logged."""

STUCK_S = 600.0
"""Time after which a loop that is still blocked counts as stuck."""

POLL_S = 0.5
REPEAT_S = 60.0

_USER_CALLS = {outcome_of.__code__, attempt.__code__}


class LoopWatch:
    """Watches the running event loop from a thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._awaited_s = math.inf

    def is_stuck(self) -> bool:
        """Return whether the loop has been blocked for `STUCK_S`. Any thread may call it."""
        return time.monotonic() - self._awaited_s > STUCK_S

    def start(self) -> None:
        """Watch the running loop, which is that of the calling thread."""
        given = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=given, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopping.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not loop.is_closed():
            began_s = time.monotonic()
            if self._stopping.wait(POLL_S):
                return
            turned = threading.Event()
            self._awaited_s = time.monotonic()
            try:
                loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # closed meanwhile
                return
            has_turned = turned.wait(BLOCKED_S)
            while not self._stopping.is_set():
                # with the interpreter's lock held, this thread wakes up late, too
                seconds = time.monotonic() - began_s - POLL_S
                if seconds >= BLOCKED_S:
                    what = _culprit(thread, began_s)
                    log.warning("the event loop was blocked for %.1f s: %s", seconds, what)
                if has_turned:
                    break
                if self.is_stuck():
                    log.error("the event loop is stuck: the groups of this worker go to others")
                has_turned = turned.wait(REPEAT_S)
            self._awaited_s = math.inf


def _culprit(loop_thread: int, began_s: float) -> str:
    """Return what runs in the loop, or ran in threads beside it since then, for people."""
    frames = sys._current_frames()
    frame = frames.pop(loop_thread, None)
    if name := _user_call(frame):
        return f"{name} blocks it at {_place(frame)}; let it await, or run in a process"
    running = sorted({name for other in frames.values() if (name := _user_call(other))})
    calls = list(LAST_CALLS)
    ended = [what for what, began, end in calls if end - max(began, began_s) >= BLOCKED_S]
    beside = ended or running
    if beside:
        return f"{', '.join(beside[:3])} may hold the interpreter's lock; let it run in a process"
    return f"it is at {_place(frame)}"


def _user_call(frame: FrameType | None) -> str | None:
    """Return the name of the user's function that a stack is in."""
    while frame and frame.f_code not in _USER_CALLS:
        frame = frame.f_back
    return str(frame.f_locals["what"]) if frame else None


def _place(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "its end"
