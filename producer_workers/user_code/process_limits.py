"""Limit the process that judges, by limits of the kernel, which also end a loop in C."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def limit_memory(memory_mb: int) -> None:
    """Limit the address space of this process, and write no core file."""
    lower(resource.RLIMIT_AS, memory_mb * 2**20)
    lower(resource.RLIMIT_CORE, 0)


def lower(limit: int, value: int) -> None:
    """Set a limit to `value`, or to what is allowed."""
    _, hard = resource.getrlimit(limit)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (most, most))


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, ends in any way.

    Only on Linux. Elsewhere it ends once it reads from its parent again.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
