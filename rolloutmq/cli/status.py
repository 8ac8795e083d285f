"""`rolloutmq status` and `top`: show the state of a run once, or live with keys."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from buffer.errors import StoreUnavailable
from buffer.run import Run
from consumer.grpo.reporting.step_log import read_steps
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, Output, Target, on_run, or_folder
from rolloutmq.output import console, emit_line, facts
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.history import History
from rolloutmq.views.live import LINE_S, KeyPresses, watch
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import read_run_view
from rolloutmq.views.screen import LiveNotes, status_screen


def _folder_status(folder: Path, error: StoreUnavailable) -> Output:
    read = RunFolder(folder)
    why = Text(f"the server of this run cannot be read: {error.message}", style="yellow")
    title = Text(f"run {read.name}, from its folder", style="bold")
    known = read.facts()
    document = {"run": read.name, "phase": "no server", "folder": known, "error": error.message}
    return Output(document, [title, why, facts([*known.items()])])


@command("Look", "status", epilog="Example: rolloutmq status --json | python -m json.tool")
@or_folder(_folder_status)
def status(target: Target) -> Output:
    """Show the state of a run: groups, weights, workers, staleness.

    Also shows whether it is paused, by whom and since when, whether every group is accounted for,
    and who waited for whom in the last steps. Of a run whose server is lost, it shows what the
    run's folder has.
    """
    view = read_run_view(target.run)
    waits = read_waits(target.run, view, read_steps(target.run_dir))
    shown = [status_screen(view), Text(f"\n{waits}")] if waits else status_screen(view)
    return Output(describe(view) | {"waits": waits and waits.shares}, shown)


@command("Look", "top", epilog="Example: rolloutmq top --run-dir runs/demo")
@on_run
def top(
    target: Target,
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between two refreshes.")
    ] = None,
    refreshes: Annotated[
        int | None, typer.Option("--count", min=1, metavar="N", help="Exit after N refreshes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run live; q or Ctrl-C quits.

    Shows what `rolloutmq status` shows, with curves, events, workers, and which process waits for
    which. Keys pause the run (with a confirmation), resume it, and open a group. If the output is
    not a terminal, prints one line every few seconds.
    """
    left = iter(range(refreshes - 1, -1, -1)) if refreshes else None

    def is_over() -> bool:
        return left is not None and next(left) == 0

    if as_json:
        _stream(target.run, is_over, every or LINE_S)
        return
    screen = console()
    notes = LiveNotes()
    is_typed = screen.is_terminal and sys.stdin.isatty()
    with KeyPresses(target.run, notes, screen) if is_typed else nullcontext() as keys:
        history = History(target.run_dir)
        watch(target.run, history, notes, screen, is_over, every_s=every, keys=keys)


def _stream(run: Run, is_over: Callable[[], bool], every_s: float) -> None:
    while True:
        emit_line(describe(read_run_view(run)))
        if is_over():
            return
        time.sleep(every_s)
