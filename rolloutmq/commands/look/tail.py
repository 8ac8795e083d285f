"""`rolloutmq tail`: follow the events of a run, one line per transition."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from buffer.control.control import Mode
from buffer.control.event_log import START, Event
from buffer.run import Run
from rolloutmq.console import console, plain
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import emit_line

EPILOG = "Example: rolloutmq tail --json | jq 'select(.event == \"reaped\")'"

_BLOCK_MS = 1000
_STYLES = {
    "completed": "green",
    "committed": "green",
    "aborted": "yellow",
    "expired": "yellow",
    "released": "yellow",
    "control": "cyan",
    "weights": "cyan",
    "reaped": "red",
    "reasserted": "red",
    "restored": "red",
    "dissolved": "red",
    "ledger_reset": "red",
    "worker_lost": "red",
    "worker_fenced": "red",
}


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(tail)


def tail(
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Start with the oldest event that is kept.")
    ] = False,
    events: Annotated[
        int | None, typer.Option("--count", min=1, help="Exit after N events.", metavar="N")
    ] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Follow the events of a run, until it is finished or Ctrl-C."""
    with open_target(redis_url, run_dir, run) as target:
        screen = console()
        for number, (identity, event) in enumerate(
            follow(target.run, from_start=from_start), start=1
        ):
            if as_json:
                emit_line({"id": identity, "ms": event[0], "event": event[1]} | event[2])
            else:
                screen.print(event_text(event), soft_wrap=True)
            if number == events:
                return


def follow(run: Run, *, from_start: bool) -> Iterator[tuple[str, Event]]:
    """Yield (id, event), from the oldest event on, or only new ones.

    Ends with the run, or when the reader of the output closes it.
    """
    last = START if from_start else run.events.newest()
    while True:
        found = run.events.read(last, block_ms=_BLOCK_MS)
        for identity, event in found:
            last = identity
            yield identity, event
        if not found and (run.control.state().mode is Mode.FINISH or is_unread()):
            return


def is_unread() -> bool:
    """Return whether the output is a pipe whose reader has ended."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, select.POLLERR)
    except (OSError, ValueError):  # a test's, or closed: not a pipe
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def event_text(event: Event) -> Text:
    """Return `16:43:05.123 completed     gid math-0000000042  version 3`."""
    ms, name, fields = event
    clock = time.strftime("%H:%M:%S", time.localtime(ms / 1000)) + f".{ms % 1000:03d}"
    text = Text.assemble((f"{clock} ", "dim"), (f"{plain(name):<14}", _STYLES.get(name, "")))
    for field, value in fields.items():
        text.append(f" {plain(field)} ", style="dim")
        text.append(plain(value))
    return text
