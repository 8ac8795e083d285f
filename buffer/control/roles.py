"""A role of a run as one process holds it: opened, renewed, lost and given up (I7).

    vacant ──open──▶ held ──close──▶ vacant
                     │ ▲
               renew └─┘ └──another process opened it, or the server lost the run──▶ lost

A run has one trainer and one producer. A nonce identifies each: the scripts refuse every other
process that still believes that it holds the role.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from buffer.control.control import WAITS_FOR, ControlState, Mode, Role, RunControl, Work
from buffer.control.worker_record import Histogram
from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.ids import new_nonce
from buffer.redis.eviction import EvictionWatch
from buffer.redis.retry import LogOnce, OutageClock

log = logging.getLogger("rolloutmq.control")

HUNG_S = 600.0  # a loop busy with one thing for longer hangs: its thread sends no heartbeats


class HeldRole:
    """One process's hold on a role of a run.

    Every heartbeat carries `waited_s` and `pauses` (the trainer's statistics) and `work` (what the
    loop does). While one piece of work takes longer than HUNG_S, the thread sends none: the loop
    hangs, and another process may take the role.
    """

    def __init__(
        self,
        control: RunControl,
        role: Role,
        *,
        nonce: str | None = None,
        waited_s: Callable[[], float] = lambda: 0.0,
        pauses: Histogram | None = None,
        work: Work | None = None,
    ) -> None:
        self.nonce = nonce or new_nonce()
        self.ended = threading.Event()
        """set when the role is given up; a process that stands in for a crashed one sets it, too"""
        self.lost: RolloutMQError | None = None
        """why the background heartbeat ended: Fenced, or a server that refuses or evicts keys"""
        self.thread: threading.Thread | None = None
        self._control = control
        self._role: Role = role
        self._waited_s = waited_s
        self._pauses = pauses
        self._work = work or Work()
        self._evictions = EvictionWatch()

    def wait_until_vacant(self, stop: threading.Event) -> bool:
        """Wait until no process holds the role; return False if `stop` is set or the run finished.

        A holder that the server's outage kept silent gets a whole timeout to send a heartbeat.
        """
        holder = self._control.holder(self._role)
        clock = OutageClock()
        log.info("waiting for the role: %s", holder)
        while not stop.wait(0.5) and self._control.state().mode is not Mode.FINISH:
            holder = self._control.holder(self._role)
            answered_s = clock.poll()
            has_had_time = not clock.had_outage or answered_s * 1000 >= holder.timeout_ms
            if not holder.is_alive and (has_had_time or not holder.nonce):
                log.warning("taking over: %s", holder)
                return True
        return False

    def renew(self) -> ControlState:
        """Send a heartbeat of the process's own loop. Raises Fenced, LostRun."""
        self._work.turns += 1
        return self._beat(closing=False)

    def renew_in_background(
        self, every_s: Callable[[], float], on_loss: Callable[[], object]
    ) -> None:
        """Send heartbeats from a thread until `close`; call `on_loss` on it if the role is lost."""
        self.ended.clear()
        self.thread = threading.Thread(
            target=self._renew_repeatedly,
            args=(every_s, on_loss),
            name=f"{self._role}-heartbeat",
            daemon=True,
        )
        self.thread.start()

    def check(self) -> None:
        """Raise what lost the role, if the background heartbeat has noticed a loss."""
        if self.lost:
            raise self.lost

    def close(self) -> None:
        """Give up the role, unless it was lost or the server is unreachable."""
        self.ended.set()
        if self.thread:
            self.thread.join()
        if self.lost:
            return
        try:
            self._beat(closing=True)
        except StoreUnavailable as error:
            log.warning("the %s role is not given up, it will time out: %s", self._role, error)

    def _beat(self, *, closing: bool) -> ControlState:
        return self._control.renew_role(
            self._role,
            self.nonce,
            closing=closing,
            waited_s=self._waited_s(),
            pauses=self._pauses,
            work=self._work,
        )

    def _renew_repeatedly(
        self, every_s: Callable[[], float], on_loss: Callable[[], object]
    ) -> None:
        hung = LogOnce(log, "no more heartbeats: this process hangs")
        while not self.ended.wait(every_s()):
            what, busy_s = self._work.now()
            is_hung = busy_s > HUNG_S and not what.startswith(WAITS_FOR)
            hung.report(what if is_hung else "")
            if is_hung:
                continue
            try:
                # the first look is before the first heartbeat: what is evicted later is of this run
                if self._evictions.is_due():
                    self._control.watch_evictions(self._evictions)
                self._beat(closing=False)
            except StoreUnavailable as error:
                log.warning("no heartbeat of the %s: %s", self._role, error)
            except RolloutMQError as error:  # raised by `check`, at the next operation
                self.lost = error
                on_loss()
                return
