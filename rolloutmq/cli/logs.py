"""`rolloutmq logs`: the logs of a run's processes, merged by time."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.text import Text

from buffer.control.control import START, Event, Mode
from buffer.errors import ConfigError
from buffer.run import Run
from rolloutmq.cli.log_files import Entry, LogFiles
from rolloutmq.command_list import command
from rolloutmq.console import console, plain
from rolloutmq.options import RUNS, AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import emit_line, version_style
from rolloutmq.run_owner import choose_folder, is_owned
from rolloutmq.views.screen import event_text

EPILOG = """
\b
Examples: rolloutmq logs
          rolloutmq logs worker -f
          rolloutmq logs trainer -n 1000 --run-dir runs/demo
"""

POLL_S = 0.3
"""Seconds between two looks at the files."""

_LEVELS = {"error": "red", "critical": "red", "warning": "yellow"}
_SHOWN = frozenset({"time", "level", "run", "role", "id", "logger", "message", "exception"})

RoleName = Annotated[
    str | None,
    typer.Argument(
        metavar="[ROLE]",
        help="Only this process, or all of a kind: trainer, producer, worker, worker-0, judge. "
        "run: what `rolloutmq run --detach` printed.",
    ),
]


@command("Look", "logs", epilog=EPILOG)
def logs(
    role: RoleName = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines, until the run ends or Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="The number of older lines.")
    ] = 100,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the logs of a run's processes, merged by time.

    They are those that `rolloutmq run` started on this machine, in all their lives. Without
    --run-dir, the run is the one under ./runs that runs, or was used last.
    """
    folder = choose_folder(run_dir, RUNS)
    files = LogFiles(folder / "logs", role or "")
    _check(files, folder, role, follow)
    was_running = is_owned(folder)
    _print(files.last(lines), as_json)
    while follow:
        # read after the look at the owner: nothing that it wrote is missed
        is_running = is_owned(folder)
        _print(files.new(), as_json)
        if is_unread() or (was_running and not is_running):
            return
        was_running = is_running
        time.sleep(POLL_S)


def _check(files: LogFiles, folder: Path, role: str | None, follow: bool) -> None:
    """Raise ConfigError if there is no such log, and none can appear."""
    if files.roles or (follow and not role):
        return
    known = ", ".join(LogFiles(folder / "logs", "").roles)
    if role and known:
        raise ConfigError(f"{folder} has no log of {role!r}", hint=f"one of {known}")
    raise ConfigError(
        f"there are no logs in {folder / 'logs'}",
        hint="only processes that `rolloutmq run` started write there; others write to stderr",
    )


def _print(entries: list[Entry], as_json: bool) -> None:
    screen = console()
    for entry in entries:
        if as_json:
            emit_line({"file": entry.role} | (entry.fields or {"message": entry.line}))
        else:
            screen.print(_text(entry), soft_wrap=True)
    sys.stdout.flush()


def _text(entry: Entry) -> Text:
    """Return `23:59:16.863 trainer     evaluation finished  task held_out  step 0`."""
    clock = entry.time[11:23]
    name = Text(f"{plain(entry.role):<11} ", style=version_style(sum(entry.role.encode())))
    start = Text.assemble((f"{clock:<12} ", "dim"), name)
    if not entry.fields:
        return start.append(plain(entry.line))
    level = str(entry.fields.get("level", ""))
    start.append(plain(str(entry.fields.get("message", ""))), style=_LEVELS.get(level, ""))
    for field, value in entry.fields.items():
        if field not in _SHOWN:
            start.append(f"  {plain(field)} ", style="dim").append(plain(_value(value)))
    if trace := entry.fields.get("exception"):
        start.append("\n" + plain(str(trace)), style="dim")
    return start


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


_BLOCK_MS = 1000


@command(
    "Look", "tail", epilog="Example: rolloutmq tail --json | jq 'select(.event == \"reaped\")'"
)
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
