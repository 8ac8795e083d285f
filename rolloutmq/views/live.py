"""Show a run until something is over: on a terminal as a screen, elsewhere as occasional lines."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from buffer.errors import StoreUnavailable
from buffer.run.run import Run
from rolloutmq.views.history import History
from rolloutmq.views.run_view import RunView, read_run_view
from rolloutmq.views.screen import MOST_EVENTS, LiveNotes, live_screen, one_line

REDRAW_S = 0.5  # between two frames on a terminal
LINE_S = 5.0  # between two lines elsewhere


def watch(
    run: Run,
    history: History,
    notes: LiveNotes,
    screen: Console,
    is_over: Callable[[], bool],
    *,
    every_s: float | None = None,
) -> None:
    """Show `run` until `is_over()` returns True after a refresh.

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
        while True:
            last = _refresh(run, history, notes) or last
            if last is not None:
                live.update(live_screen(last, history, notes), refresh=True)
            if is_over():
                return
            time.sleep(every_s or REDRAW_S)


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
