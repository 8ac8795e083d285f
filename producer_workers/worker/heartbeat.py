"""The worker's heartbeat, in a thread of its own, and the watch over the event loop.

A heartbeat renews leases, carries the receipt and brings the control state (I2, I10). The control
line does the last two sooner.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from buffer.control.control import ControlState
from buffer.control.fleet import HeartbeatReply
from buffer.control.worker_record import HeartbeatReport
from buffer.errors import Fenced, LostRun, RolloutMQError, RunError, StoreUnavailable
from buffer.job import Job
from buffer.redis.retry import LogOnce
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from producer_workers.worker.inbox import HeartbeatAnswered, Inbox, PartEnded

log = logging.getLogger("rolloutmq.worker")


class TokenRate:
    """Tokens per second between the last two calls that were far enough apart."""

    def __init__(self) -> None:
        self._measured_at = time.monotonic()
        self._tokens = 0
        self._rate = 0.0

    def measure(self, tokens: int) -> float:
        """Return the rate; `tokens`: all that were made so far."""
        now = time.monotonic()
        seconds = now - self._measured_at
        if seconds > 1.0:  # shortest time over which tokens per second are measured
            self._rate = (tokens - self._tokens) / seconds
            self._measured_at = now
            self._tokens = tokens
        return self._rate


@dataclass(eq=False)
class Heartbeat:
    """Sends heartbeats for one registration until `stop`, but none while the worker `is_stuck`.

    `report` is called on this thread for the content, the held jobs, and the oldest weights of
    each; `sampled` at each registration, for the number of tokens so far. Posts HeartbeatAnswered,
    and PartEnded before it ends: the id was registered again, or the run is gone.
    """

    _run: Run
    _worker: str
    _nonce: str
    _facts: Mapping[str, str]
    _report: Callable[[], tuple[HeartbeatReport, Sequence[Job], Mapping[Job, PolicyVersion]]]
    _inbox: Inbox
    _is_stuck: Callable[[], bool]
    _sampled: Callable[[], int]

    def __post_init__(self) -> None:
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._outage = LogOnce(log, "no heartbeat")
        self._reported: Mapping[Job, PolicyVersion] = {}
        self._thread = threading.Thread(target=self._send_all, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_now(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Send no more. Return once the last one is over."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def _send_all(self) -> None:
        due = swept = time.monotonic()
        while not self._stopping.is_set():
            self._wake.clear()
            if time.monotonic() >= due:
                due = time.monotonic() + self._run.limits.heartbeat_ms / 1000
            try:
                # what nothing works on must not be held
                if not self._is_stuck():
                    self._send()
                # leases of dead workers must run out, and memory must be freed, even if no
                # producer is alive
                if time.monotonic() - swept > self._run.limits.lease_ms / 2000:
                    self._run.janitor.sweep_in_turn()
                    swept = time.monotonic()
                self._outage.report("")
            except StoreUnavailable as error:
                self._outage.report(error.hint)
            except (Fenced, RunError) as error:
                self._inbox.post_from_thread(PartEnded(error))
                return
            except RolloutMQError:
                log.exception("a heartbeat failed")
            self._wake.wait(max(0.0, due - time.monotonic()))

    def _send(self) -> None:
        report, held, oldest = self._report()
        reported = {job for job, weights in self._reported.items() if oldest.get(job) == weights}
        beat = self._run.fleet.heartbeat(self._worker, self._nonce, report, held, oldest, reported)
        self._run.adopt_limits(beat.limits)
        # a server that holds something else may have lost these, too
        self._reported = oldest if beat.is_agreed else {}
        if not beat.known and not self._stopping.is_set():
            log.warning("the server does not know this worker (any more); registering again")
            beat = HeartbeatReply(True, self.register(), beat.lost, beat.limits)
        self._inbox.post_from_thread(HeartbeatAnswered(beat, report))

    def register(self) -> ControlState:
        """Join the run (again). Raises RunNotFound, and LostRun if another run has its name."""
        run_nonce, state = self._run.fleet.register(
            self._worker, self._nonce, self._facts, self._sampled()
        )
        if run_nonce != self._run.nonce:
            message = f"the server holds another run named {self._run.name!r} now"
            raise LostRun(message, hint="start this worker again")
        return state


BLOCKED_S = 2.0  # time without a turn of the loop that is logged

STUCK_S = 600.0  # time after which a blocked loop counts as stuck

POLL_S = 0.5


class LoopWatch:
    """Watches the running event loop from a thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._awaited_s = math.inf

    def is_stuck(self) -> bool:
        """Return whether the loop has been blocked for `STUCK_S`. Any thread may call it."""
        return time.monotonic() - self._awaited_s > STUCK_S

    def start(self) -> None:
        given = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=given, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._stopping.wait(POLL_S):
            turned = threading.Event()
            self._awaited_s = time.monotonic()
            try:
                loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # closed meanwhile
                return
            wait_s = BLOCKED_S
            while not (turned.wait(wait_s) or self._stopping.is_set()):
                stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
                log.warning(
                    "the event loop is blocked: let this await, or run in a process:\n%s", stack
                )
                if self.is_stuck():
                    log.error("the event loop is stuck: the groups of this worker go to others")
                wait_s = 60.0
            self._awaited_s = math.inf
