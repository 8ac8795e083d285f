"""A standby producer: it takes the role once the active one has left or stopped answering (I7).

    waits ──no process holds the role──▶ opens it ──▶ produces until stopped, fenced or finished
      ▲                                     │
      └──── another standby was faster ◀────┘

Data sets and tokenizer are loaded before, so that only the timeout of the role is waited for.
"""

from __future__ import annotations

import logging
import threading

from buffer.errors import RoleHeld
from buffer.run import Run
from producer_workers.producer.producer import AgentLoopManager

log = logging.getLogger("rolloutmq.producer")


def stand_by(run: Run, member: AgentLoopManager, stop: threading.Event) -> None:
    """Produce as soon as no other producer does.

    Raises what `produce_loop` raises, but for RoleHeld.
    """
    run.store.patience = lambda: not stop.is_set()
    while member.role.wait_until_vacant(stop):
        try:
            member.produce_loop(stop)
            return
        except RoleHeld as error:
            log.info("standing by again: %s", error)
