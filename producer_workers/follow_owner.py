"""Processes and their ends: with the owner, of a whole session, and in words.

`rolloutmq run` cannot pass SIGKILL on to its children, so that they follow it by themselves.

A child ends as after SIGTERM; if it cannot, it is killed ten minutes later. With leases and
checkpoints, nothing is lost.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

OWNER = "ROLLOUTMQ_OWNER_PID"  # the environment variable with the pid of the process to follow

# Seconds from SIGTERM to SIGKILL without an owner, as `rolloutmq run` gives its trainer.
ORPHAN_S = 600.0

_POLL_S = 1.0


def kill_session(pid: int) -> None:
    """Kill the process that leads a session, and all that it has started there."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def how_ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


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
