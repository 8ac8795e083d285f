"""A standby producer: it takes the role once the active one has left or stopped answering (I7).

    waits ──no process holds the role──▶ opens it ──▶ produces until stopped, fenced or finished
      ▲                                     │
      └──── another standby was faster ◀────┘

Data sets and tokenizer are loaded before, so that only the timeout of the role is waited for.
"""

from __future__ import annotations

import logging
import threading

from buffer.control.control import Mode
from buffer.errors import RoleHeld
from buffer.run import Run
from buffer.store.retry import OutageClock
from producer_workers.producer.producer import AgentLoopManager

log = logging.getLogger("rolloutmq.producer")

POLL_S = 0.5
"""Time between two polls of who holds the role."""


def stand_by(run: Run, member: AgentLoopManager, stop: threading.Event) -> None:
    """Produce as soon as no other producer does.

    Raises what `produce_loop` raises, but for RoleHeld.
    """
    run.store.patience = lambda: not stop.is_set()
    while _await_vacancy(run, stop):
        try:
            member.produce_loop(stop)
            return
        except RoleHeld as error:
            log.info("standing by again: %s", error)


def _await_vacancy(run: Run, stop: threading.Event) -> bool:
    """Wait until the role is vacant; return False if it will not be needed any more."""
    holder = run.control.holder("producer")
    clock = OutageClock()
    log.info("standing by: %s", holder)
    while not stop.wait(POLL_S) and run.control.state().mode is not Mode.FINISH:
        holder = run.control.holder("producer")
        answered_s = clock.poll()
        # during an outage of the server, the holder could not send heartbeats either
        has_had_time = not clock.had_outage or answered_s * 1000 >= holder.timeout_ms
        if not holder.is_alive and (has_had_time or not holder.nonce):
            log.warning("taking over: %s", holder)
            return True
    return False
