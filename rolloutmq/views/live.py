"""Show a run until something is over: on a terminal with keys, elsewhere as occasional lines."""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from collections.abc import Callable
from types import TracebackType

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
_MOST_BYTES = 64


class Keyboard:
    """Reads single keys without echo, except Ctrl-C; `with` restores the terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_open = True

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> str:
        """Return what was typed, or "" after `timeout_s`; an arrow key begins with an escape."""
        if not self._is_open:
            time.sleep(timeout_s)
            return ""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return ""
        typed = os.read(self._descriptor, _MOST_BYTES)
        self._is_open = bool(typed)
        return typed.decode(errors="ignore")


KEYS = "p pause · r resume · o open a group · q quit"
_MODES = {"a": Mode.ABORT, "d": Mode.DRAIN, "k": Mode.KEEP}
_WHICH = "pause? a abort groups · d finish them · k freeze them · any other key: no pause"
_ESCAPE, _ENTER, _ERASE = "\x1b", ("\r", "\n"), ("\x7f", "\b")
_LONGEST = 75


class Steering:
    """Reads `keyboard` between two refreshes; questions and answers are in `notes.prompt`."""

    def __init__(self, run: Run, notes: LiveNotes, keyboard: Keyboard) -> None:
        self._run = run
        self._notes = notes
        self._keyboard = keyboard
        self._next: Callable[[str], None] = self._choose
        self._typed = ""
        self._group = ""
        self.is_over = False
        notes.prompt = KEYS

    def wait(self, seconds: float) -> None:
        """Wait for a key, and handle it. Afterwards, `is_over` is True if the user quits."""
        typed = self._keyboard.read(seconds)
        for key in typed[:1] if typed.startswith(_ESCAPE) else typed:
            try:
                self._next(key)
            except RolloutMQError as error:
                self._report(str(error))

    @property
    def wants_group(self) -> bool:
        return bool(self._group)

    def show_group(self, screen: Console) -> None:
        """Print the chosen group below the last frame, until a key is pressed."""
        gid = self._group
        self._group = ""
        try:
            document = find_group(self._run, gid).document(tokens=False)
        except RolloutMQError as error:
            self._report(str(error))
            return
        screen.print(*group_parts(document), sep="\n")
        screen.print("\npress any key to go back", style="dim")
        while not self._keyboard.read(1.0):
            pass

    def _choose(self, key: str) -> None:
        if key == "q":
            self.is_over = True
        elif key == "p":
            self._ask(_WHICH, self._pause)
        elif key == "r":
            self._hold(Mode.RUN)
        elif key == "o":
            self._typed = ""
            self._ask("group: ", self._type)

    def _ask(self, question: str, answer: Callable[[str], None]) -> None:
        self._notes.prompt = question
        self._next = answer

    def _report(self, what: str) -> None:
        self._ask(f"{what}\n{KEYS}" if what else KEYS, self._choose)

    def _pause(self, key: str) -> None:
        if key in _MODES:
            self._hold(_MODES[key])
        else:
            self._report("not paused")

    def _hold(self, mode: Mode) -> None:
        lines: list[str] = []
        set_operator_mode(self._run, mode, lines.append)
        self._report("\n".join(lines))

    def _type(self, key: str) -> None:
        if key in _ENTER:
            self._group = _gid(self._typed)
            self._report("")
        elif key == _ESCAPE:
            self._report("")
        else:
            if key in _ERASE:
                self._typed = self._typed[:-1]
            elif key.isprintable():
                self._typed = (self._typed + key)[:_LONGEST]
            self._ask(f"group: {self._typed}", self._type)


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
    steering: Steering | None = None,
) -> None:
    """Show `run` until `is_over()` returns True after a refresh, or `steering` is over.

    The last frame stays on the screen, with a red line while the server is unreachable.
    """
    if not screen.is_terminal:
        _print_lines(run, history, notes, screen, is_over, every_s or LINE_S)
        return
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        last: RunView | None = None
        while True:
            last = _refresh(run, history, notes) or last
            if last is not None:
                live.update(live_screen(last, history, notes), refresh=True)
            if is_over():
                return
            if steering is None:
                time.sleep(every_s or REDRAW_S)
                continue
            steering.wait(every_s or REDRAW_S)
            if steering.is_over:
                return
            if steering.wants_group:
                live.stop()
                steering.show_group(screen)
                live.start()


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


def _print_lines(
    run: Run,
    history: History,
    notes: LiveNotes,
    screen: Console,
    is_over: Callable[[], bool],
    every_s: float,
) -> None:
    while True:
        view = _refresh(run, history, notes)
        line = notes.trouble if view is None else one_line(view, history, notes)
        screen.print(Text(line), soft_wrap=True)
        if is_over():
            return
        time.sleep(every_s)
