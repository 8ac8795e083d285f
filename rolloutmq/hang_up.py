"""Stop in order: at SIGTERM, at Ctrl-C, and at the end of the terminal."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def stop_at_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set, instead of ending the process."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that it cleans up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def follow_terminal() -> None:
    """Send this process SIGTERM at the first SIGHUP, unless SIGHUP is ignored, as under nohup.

    A shell and the kernel may both report the end; a second SIGTERM would end the process at once.
    """

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        drop_lost_output()
        os.kill(os.getpid(), signal.SIGTERM)

    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, hang_up)


def is_lost_terminal(error: BaseException) -> bool:
    """Return whether an error is that of writing to a lost terminal."""
    return isinstance(error, OSError) and error.errno == errno.EIO and drop_lost_output()


def drop_lost_output() -> bool:
    """Discard output to a lost terminal: a failed write would exit. Return whether it was lost."""
    watch = select.poll()
    for number in (1, 2):
        watch.register(number, 0)
    # a pipe without a reader is different: SIGPIPE ends its writer
    lost = [number for number, found in watch.poll(0) if found & select.POLLHUP]
    if lost:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in lost:
            os.dup2(nothing, number)
        os.close(nothing)
    return bool(lost)
