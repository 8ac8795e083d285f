"""Waits until every live worker has carried out the newest control state (I10); who stays silent is fenced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from buffer.outage_clock import OutageClock
from buffer.run import Run

log = logging.getLogger("rolloutmq.consumer")

RECEIPT_S, LOOK_S = 20e-6, 0.01
"""What the server needs for a receipt, and between two looks at most. Receipts come in crowds: one look for each would
keep the server from taking the others."""


def await_receipts(run: Run, check: Callable[[], None]) -> None:
    """Of the newest epoch, whichever that is: an operator may change the mode meanwhile. `check` may raise."""
    clock = OutageClock()
    while silent := run.control.silent_workers():
        check()
        if clock.look() > run.limits.pause_timeout_s:
            for worker in silent:
                log.warning("no receipt; fencing", extra={"worker": worker})
                run.fleet.fence(worker)
        run.store.wait_bell(run.keys.bell("receipts"), 0.1)
        time.sleep(min(LOOK_S, RECEIPT_S * len(silent)))
