"""The end of a terminal, which is SIGTERM for every process: each of them stops in order."""

from __future__ import annotations

import errno
import os
import select
import signal


def follow_terminal() -> None:
    """Send this process SIGTERM at the first SIGHUP; an inherited ignore stays, as under nohup.

    A shell and the kernel may both report the end of a terminal: later ones are no second SIGTERM,
    which would end the process at once.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hang_up)


def _hang_up(*_: object) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    drop_lost_output()
    os.kill(os.getpid(), signal.SIGTERM)


def is_lost_terminal(error: BaseException) -> bool:
    """Return whether an error is that of writing to a terminal that is gone."""
    return isinstance(error, OSError) and error.errno == errno.EIO and drop_lost_output()


def drop_lost_output() -> bool:
    """Discard what is written to a terminal that is gone; return whether there was one.

    The write would fail, and end a process before it has stopped in order.
    """
    lost = [number for number in (1, 2) if _is_lost(number)]
    if lost:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in lost:
            os.dup2(nothing, number)
        os.close(nothing)
    return bool(lost)


def _is_lost(number: int) -> bool:
    watch = select.poll()
    watch.register(number, 0)
    found = watch.poll(0)
    # a pipe without a reader is another matter: its writer ends (SIGPIPE)
    return bool(found and found[0][1] & select.POLLHUP)
