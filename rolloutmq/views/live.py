"""Show a run until something is over: on a terminal with keys, elsewhere as occasional lines."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from buffer.control.control import Mode
from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.ids import group_id
from buffer.run import Run
from rolloutmq.views.found_group import find_group, group_parts
from rolloutmq.views.history import History
from rolloutmq.views.operator_mode import set_operator_mode
from rolloutmq.views.run_view import RunView, read_run_view
from rolloutmq.views.screen import MOST_EVENTS, LiveNotes, live_screen, one_line

REDRAW_S = 0.5  # between two frames on a terminal
LINE_S = 5.0  # between two lines elsewhere


KEYS = "p pause · r resume · o open a group · q quit"
_MODES = {"a": Mode.ABORT, "d": Mode.DRAIN, "k": Mode.KEEP}
_WHICH = "pause? a abort groups · d finish them · k freeze them · any other key: no pause"


class KeyPresses:
    """Handles keys between two frames; `with` reads them one by one without echo."""

    def __init__(self, run: Run, notes: LiveNotes, screen: Console) -> None:
        self._run = run
        self._notes = notes
        self._screen = screen
        self._stdin = sys.stdin.fileno()
        notes.prompt = KEYS

    def __enter__(self) -> KeyPresses:
        self._before = termios.tcgetattr(self._stdin)
        tty.setcbreak(self._stdin)
        return self

    def __exit__(self, *error: object) -> None:
        termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float | None = None) -> str:
        """Return the key that is pressed, or "" after `timeout_s`."""
        if not select.select([self._stdin], [], [], timeout_s)[0]:
            return ""
        key = os.read(self._stdin, 1)
        if not key:  # the input is closed
            time.sleep(timeout_s or REDRAW_S)
        return key.decode(errors="ignore")

    def handle(self, key: str, live: Live, draw: Callable[[], None]) -> None:
        """Do what a key stands for; `draw` shows the question that it asks."""
        try:
            if key == "p":
                self._notes.prompt = _WHICH
                draw()
                mode = _MODES.get(self.read())
                self._hold(mode) if mode else self._tell("not paused")
            elif key == "r":
                self._hold(Mode.RUN)
            elif key == "o":
                live.stop()
                try:
                    self._open_group()
                finally:
                    live.start()
        except (RolloutMQError, EOFError) as error:
            self._tell(str(error))

    def _hold(self, mode: Mode) -> None:
        lines: list[str] = []
        set_operator_mode(self._run, mode, lines.append)
        self._tell("\n".join(lines))

    def _tell(self, what: str) -> None:
        self._notes.prompt = f"{what}\n{KEYS}" if what else KEYS

    def _open_group(self) -> None:
        """Ask for a group, and print it below the last frame until a key is pressed."""
        self.__exit__()
        try:
            gid = _gid(self._screen.input("group: "))
        finally:
            tty.setcbreak(self._stdin)
        self._tell("")
        for part in group_parts(find_group(self._run, gid).document(tokens=False)):
            self._screen.print(part)
        self._screen.print("\npress any key to go back", style="dim")
        self.read()


def _gid(text: str) -> str:
    """Complete a short id: math-42 becomes math-0000000042."""
    task, _, draw = text.strip().rpartition("-")
    if task and draw.isascii() and draw.isdigit() and len(draw) < 10:
        return group_id(task, int(draw))
    return text.strip()


def watch(
    run: Run,
    history: History,
    notes: LiveNotes,
    screen: Console,
    is_over: Callable[[], bool],
    *,
    every_s: float | None = None,
    keys: KeyPresses | None = None,
) -> None:
    """Show `run` until `is_over()` returns True after a refresh, or `q` is pressed.

    The last frame stays on the screen, with a red line while the server is unreachable.
    """
    if not screen.is_terminal:
        while True:
            view = _refresh(run, history, notes)
            line = notes.trouble if view is None else one_line(view, history, notes)
            screen.print(Text(line), soft_wrap=True)
            if is_over():
                return
            time.sleep(every_s or LINE_S)
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        last: RunView | None = None

        def draw() -> None:
            if last is not None:
                live.update(live_screen(last, history, notes), refresh=True)

        while True:
            last = _refresh(run, history, notes) or last
            draw()
            if is_over():
                return
            if keys is None:
                time.sleep(every_s or REDRAW_S)
                continue
            if (key := keys.read(every_s or REDRAW_S)) == "q":
                return
            keys.handle(key, live, draw)


def _refresh(run: Run, history: History, notes: LiveNotes) -> RunView | None:
    """Read the run; None, with the reason in `notes.trouble`, while the server is unreachable."""
    try:
        view = read_run_view(run, events=MOST_EVENTS)
    except StoreUnavailable as error:
        notes.trouble = error.message
        return None
    notes.trouble = ""
    history.observe(view)
    return view
