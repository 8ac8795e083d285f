"""A child process does not outlive the process that started it.

`rolloutmq run` may be killed with SIGKILL, which it cannot pass on: its children notice that they were orphaned and end
themselves as if they had been told to stop. Nothing is lost: that is what leases and checkpoints are for.
"""

from __future__ import annotations

import os
import signal
import threading

OWNER = "ROLLOUTMQ_OWNER_PID"
"""Environment variable that names the process to follow."""

_POLL_S = 1.0


def follow_owner() -> None:
    """Send this process SIGTERM once the process in `OWNER` is no longer its parent. Does nothing without one."""
    owner = os.environ.get(OWNER)
    if owner:
        threading.Thread(target=_watch, args=(int(owner),), name="lifeline", daemon=True).start()


def _watch(owner: int) -> None:
    stopped = threading.Event()
    while os.getppid() == owner:
        stopped.wait(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
