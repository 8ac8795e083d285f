"""The end of a process with the one above it.

`rolloutmq run` may be killed with SIGKILL, which it cannot pass on. Its children notice that they
have another parent, and end as after SIGTERM. A child that cannot end, because the server or
another rank is gone as well, is killed ten minutes later. With leases and checkpoints, nothing is
lost.
"""

from __future__ import annotations

import os
import signal
import threading

OWNER = "ROLLOUTMQ_OWNER_PID"
"""The environment variable with the pid of the process to follow."""

ORPHAN_S = 600.0
"""Seconds from SIGTERM to SIGKILL for a process whose owner is gone: as many as `rolloutmq run`
gives its trainer."""

_POLL_S = 1.0


def follow_owner() -> None:
    """Send SIGTERM to this process once the process in `OWNER` is no longer its parent.

    SIGKILL follows `ORPHAN_S` later. Do nothing if the variable is not set.
    """
    owner = os.environ.get(OWNER)
    if owner:
        threading.Thread(target=_watch, args=(int(owner),), name="lifeline", daemon=True).start()


def _watch(owner: int) -> None:
    stopped = threading.Event()
    while os.getppid() == owner:
        stopped.wait(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    stopped.wait(ORPHAN_S)
    # a process that waits for a lost server or rank would hold its GPU for ever
    os.kill(os.getpid(), signal.SIGKILL)
