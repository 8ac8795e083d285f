"""`rolloutmq status`: show the state of a run, once or again and again."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Option

from buffer.errors import StoreUnavailable
from consumer.handle.step_log import read_steps
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, Output, Target, or_folder
from rolloutmq.output import console, emit_line, facts
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.history import History
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.run_json import describe
from rolloutmq.views.run_view import read_run_view
from rolloutmq.views.screen import LINE_S, LiveNotes, status_screen, watch


def _folder_status(folder: Path, error: StoreUnavailable, **_: object) -> Output:
    read = RunFolder(folder)
    why = Text(f"the server of this run cannot be read: {error.message}", style="yellow")
    title = Text(f"run {read.name}, from its folder", style="bold")
    known = read.facts()
    document = {"run": read.name, "phase": "no server", "folder": known, "error": error.message}
    return Output(document, [title, why, facts([*known.items()])])


@command("status", epilog="Example: rolloutmq status --json | python -m json.tool")
@or_folder(_folder_status)
def status(
    target: Target,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Show it again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None, Option(min=0.1, help="With --follow: seconds between two refreshes.")
    ] = None,
    refreshes: Annotated[
        int | None,
        Option("--count", min=1, metavar="N", help="With --follow: exit after N refreshes."),
    ] = None,
    as_json: AsJson = False,
) -> Output | None:
    """Show the state of a run: groups, weights, workers, staleness.

    Also shows whether it is paused, by whom and since when, and whether every group is accounted
    for. It ends with what the run waits for, as `rolloutmq doctor` has it, and with who waited for
    whom in the last steps. With --follow, it adds curves, events and workers; if the output is not
    a terminal, it prints one line every few seconds. Of a run whose server is lost, it shows what
    the run's folder has.
    """
    if follow:
        _follow(target, refreshes, every, as_json=as_json)
        return None
    view = read_run_view(target.run)
    waits = read_waits(target.run, view, read_steps(target.run_dir))
    found = diagnose(view)
    shown = [status_screen(view), *(symptom.text() for symptom in found)]
    shown += [Text(f"\n{waits}")] if waits else []
    findings = [asdict(symptom) for symptom in found]
    document = {"waits": waits and waits.shares, "findings": findings}
    return Output(describe(view) | document, shown)


def _follow(target: Target, refreshes: int | None, every_s: float | None, *, as_json: bool) -> None:
    left = iter(range(refreshes - 1, -1, -1)) if refreshes else None

    def is_over() -> bool:
        return left is not None and next(left) == 0

    if not as_json:
        history = History(target.run_dir)
        watch(target.run, history, LiveNotes(), console(), is_over, every_s=every_s)
        return
    while True:
        emit_line(describe(read_run_view(target.run)))
        if is_over():
            return
        time.sleep(every_s or LINE_S)
