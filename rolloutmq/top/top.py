"""`rolloutmq top`: redraw the live view on a terminal, or print a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from buffer.errors import StoreUnavailable
from buffer.run import Run
from rolloutmq.console import console
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import emit_line
from rolloutmq.top.keys import Keyboard, Steering
from rolloutmq.top.live_view import LiveView
from rolloutmq.views.history import History
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import RunView

EPILOG = "Example: rolloutmq top --run-dir runs/demo"

REDRAW_S = 0.5
"""Seconds between two frames on a terminal."""

LINE_S = 5.0
"""Seconds between two lines elsewhere."""


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(top)


def top(
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between two refreshes.")
    ] = None,
    refreshes: Annotated[
        int | None, typer.Option("--count", min=1, metavar="N", help="Exit after N refreshes.")
    ] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run live; q or Ctrl-C quits.

    Shows steps, rewards, groups by stage, staleness, workers, and which process waits for which.
    Keys pause the run (with a confirmation), resume it, and open a group. If the output is not a
    terminal, prints one line every few seconds.
    """
    left = iter(range(refreshes - 1, -1, -1)) if refreshes else None
    with open_target(redis_url, run_dir, run) as target:
        view = LiveView(run_dir=target.run_dir)

        def is_over() -> bool:
            return left is not None and next(left) == 0

        if as_json:
            _stream(target.run, view, is_over, every or LINE_S)
        else:
            screen = console()
            with _keys(screen) as keyboard:
                steering = Steering(target.run, view, keyboard) if keyboard else None
                watch(target.run, view, screen, is_over, every_s=every, steering=steering)


@contextmanager
def _keys(screen: Console) -> Iterator[Keyboard | None]:
    """Open the keyboard, if there is one."""
    if screen.is_terminal and sys.stdin.isatty():
        with Keyboard(sys.stdin.fileno()) as keyboard:
            yield keyboard
    else:
        yield None


def watch(
    run: Run,
    view: LiveView,
    screen: Console,
    is_over: Callable[[], bool],
    *,
    every_s: float | None = None,
    steering: Steering | None = None,
) -> None:
    """Show `run` until `is_over()` returns True after a refresh, or `steering` is over.

    The last frame stays on the screen. While the server is unreachable, the last frame stays, with
    a red line.
    """
    history = view.history()
    if not screen.is_terminal:
        _print_lines(run, view, history, screen, is_over, every_s or LINE_S)
        return
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        last: RunView | None = None
        while True:
            last = _refresh(run, view, history) or last
            if last is not None:
                live.update(view.render(last, history), refresh=True)
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


def _refresh(run: Run, view: LiveView, history: History) -> RunView | None:
    """Take a snapshot; None, with the reason in `view.trouble`, while the server is unreachable."""
    try:
        snap = view.snapshot(run)
    except StoreUnavailable as error:
        view.trouble = error.message
        return None
    view.trouble = ""
    history.observe(snap)
    return snap


def _print_lines(
    run: Run,
    view: LiveView,
    history: History,
    screen: Console,
    is_over: Callable[[], bool],
    every_s: float,
) -> None:
    while True:
        snap = _refresh(run, view, history)
        screen.print(
            Text(view.trouble if snap is None else view.line(snap, history)), soft_wrap=True
        )
        if is_over():
            return
        time.sleep(every_s)


def _stream(run: Run, view: LiveView, is_over: Callable[[], bool], every_s: float) -> None:
    while True:
        emit_line(describe(view.snapshot(run)))
        if is_over():
            return
        time.sleep(every_s)
