"""The keys of `rolloutmq top`, on a real terminal of 80 columns: pause (asked twice), continue,
open a group, leave.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from buffer.control.control import Mode
from buffer.ids import group_id
from buffer.redis.server.embedded import EmbeddedServer
from tests.rolloutmq.conftest import ROOT
from tests.rolloutmq.populate import Scene

COLUMNS = 80
ROWS = 50
PATIENCE_S = 400.0


class Terminal:
    """The other end of a terminal; `seen` is all that came out of it since the last key."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self._descriptor, keys.encode())

    def until(self, words: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while words not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen):
            assert time.monotonic() < end, f"{words!r} was not seen: {self.seen[-2000:]}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self.seen += os.read(self._descriptor, 65536).decode(errors="replace")


@contextmanager
def top(server: EmbeddedServer) -> Iterator[tuple[Terminal, subprocess.Popen[bytes], int]]:
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    hidden = ("REDIS_URL", "COLUMNS", "LINES", "NO_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {
        "TERM": "xterm"
    }
    command = [
        sys.executable,
        "-m",
        "rolloutmq",
        "top",
        "--every",
        "0.2",
        "--run-dir",
        str(server.folder),
    ]
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, cwd=ROOT, env=environment
    )
    try:
        yield Terminal(ours), process, its
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)


def leave(terminal: Terminal, process: subprocess.Popen[bytes]) -> int:
    """Press q, and drain what it still says: nobody can end who cannot write."""
    terminal.press("q")
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        if select.select([terminal._descriptor], [], [], 0.05)[0]:
            os.read(terminal._descriptor, 65536)
    return process.wait(PATIENCE_S)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_keys_pause_and_continue_a_run_and_open_a_group(
    scene: Scene, server: EmbeddedServer
) -> None:
    control = scene.run.control
    with top(server) as (terminal, process, its):
        terminal.until("p pause")
        until(lambda: not termios.tcgetattr(its)[3] & termios.ECHO)
        for keys, words, mode in (
            ("p", "any other key: no pause", Mode.RUN),
            ("x", "not paused", Mode.RUN),
            ("pd", "paused by the operator", Mode.DRAIN),
            ("r", "resumed", Mode.RUN),
        ):
            terminal.press(keys)
            terminal.until(words)
            assert control.state().mode is mode
        terminal.press("o")
        terminal.until("group: ")
        terminal.press("mathx\x7f-2\r")
        terminal.until("press any key to go back")
        assert group_id("math", 2) in terminal.seen
        terminal.press(" ")
        terminal.until("p pause")
        terminal.press("o")
        terminal.until("group: ")
        terminal.press("nothing\r")
        terminal.until("is not a group id")
        assert leave(terminal, process) == 0
        # the terminal is as it was: what is typed is seen again
        assert termios.tcgetattr(its)[3] & termios.ECHO
        assert termios.tcgetattr(its)[3] & termios.ICANON
