"""Keys of a terminal as they are pressed: nobody waits for the end of a line, and nothing is echoed."""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from types import TracebackType

_MOST_BYTES = 64


class Keyboard:
    """Of the terminal `descriptor`, in a `with`; at its end the terminal is what it was. Ctrl-C stays what it is."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_open = True

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> str:
        """What was typed, at once; "" when nothing is for so long. Arrows and the like begin with an escape."""
        if not self._is_open:
            time.sleep(timeout_s)
            return ""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return ""
        typed = os.read(self._descriptor, _MOST_BYTES)
        self._is_open = bool(typed)
        return typed.decode(errors="ignore")
