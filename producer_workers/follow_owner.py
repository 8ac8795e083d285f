"""End a process with its owner: `rolloutmq run` cannot pass SIGKILL on to its children.

A child ends as after SIGTERM; if it cannot, it is killed ten minutes later. With leases and
checkpoints, nothing is lost.
"""

from __future__ import annotations

import os
import signal
import threading

OWNER = "ROLLOUTMQ_OWNER_PID"  # the environment variable with the pid of the process to follow

# Seconds from SIGTERM to SIGKILL without an owner, as `rolloutmq run` gives its trainer.
ORPHAN_S = 600.0

_POLL_S = 1.0


def follow_owner() -> None:
    """Send SIGTERM to this process once its parent is not `OWNER`, SIGKILL `ORPHAN_S` later."""
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
