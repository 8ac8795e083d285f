"""`rolloutmq logs`: the logs of a run's processes, merged by time, and the events of its queue."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import orjson
from rich.text import Text
from typer import Argument, Option

from buffer.control.control import Mode
from buffer.control.events import Event
from buffer.errors import ConfigError
from buffer.run.run import Run
from rolloutmq.command_list import command
from rolloutmq.options import RUNS, AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import console, emit_line, version_style
from rolloutmq.run_owner import choose_folder, is_owned
from rolloutmq.views.explain.log_files import FIELDS_OF_ALL, Entry, LogFiles, filter_about
from rolloutmq.views.screen import event_text

EPILOG = """
\b
Examples: rolloutmq logs
          rolloutmq logs worker -f
          rolloutmq logs --level warning --about math-0000000042
          rolloutmq logs trainer -n 1000 --run-dir runs/demo
          rolloutmq logs events -f --json | jq 'select(.event == "reaped")'
"""

POLL_S = 0.3
_LEVELS = {"error": "red", "critical": "red", "warning": "yellow"}


@command("logs", epilog=EPILOG)
def logs(
    role: Annotated[
        str | None,
        Argument(
            metavar="ROLE",
            help="Only this process, or all of a kind: trainer, producer, worker, worker-0, judge. "
            "run: what `rolloutmq run --detach` printed. events: those of the queue, from the "
            "server.",
        ),
    ] = None,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Print new lines, until the run ends or Ctrl-C.")
    ] = False,
    lines: Annotated[int, Option("--lines", "-n", min=0, help="The number of older lines.")] = 100,
    level: Annotated[
        Literal["info", "warning", "error"] | None,
        Option("--level", help="Only lines of this level and above."),
    ] = None,
    about: Annotated[
        str,
        Option("--about", help="Only lines about this group, worker or number of a train step."),
    ] = "",
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show the logs of a run's processes, merged by time; or, as ROLE `events`, those of its queue.

    The processes are those that `rolloutmq run` started on this machine, in all their lives.
    Without --run-dir, the run is the one under ./runs that runs, or was used last. Events come from
    the server, whoever started the processes.
    """
    if role == "events":
        with open_target(redis_url, run_dir, run) as target:
            _print_events(target.run, lines, follows=follow, as_json=as_json)
        return
    folder = choose_folder(run_dir, RUNS)
    files = LogFiles(folder / "logs", role or "")
    _check(files, folder, role, follow)
    was_running = is_owned(folder)
    wanted = replace(filter_about(folder, about), level=level or "")
    _print(files.last(lines, wanted), as_json)
    while follow:
        # read after the look at the owner: nothing that it wrote is missed
        is_running = is_owned(folder)
        _print(files.new(wanted), as_json)
        if is_unread() or (was_running and not is_running):
            return
        was_running = is_running
        time.sleep(POLL_S)


def _check(files: LogFiles, folder: Path, role: str | None, follow: bool) -> None:
    """Raise ConfigError if the log does not exist and cannot appear."""
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
    name = Text(f"{entry.role:<11} ", style=version_style(sum(entry.role.encode())))
    start = Text.assemble((f"{clock:<12} ", "dim"), name)
    if not entry.fields:
        return start.append(entry.line)
    level = str(entry.fields.get("level", ""))
    start.append(str(entry.fields.get("message", "")), style=_LEVELS.get(level, ""))
    for field, value in entry.fields.items():
        if field not in FIELDS_OF_ALL:
            start.append(f"  {field} ", style="dim").append(_value(value))
    if trace := entry.fields.get("exception"):
        start.append("\n" + str(trace), style="dim")
    return start


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _print_events(run: Run, lines: int, *, follows: bool, as_json: bool) -> None:
    """Print the newest events of a run; if it `follows`, new ones, too."""
    kept = run.events.read()
    newest = kept[-1][0] if kept else run.events.newest()
    coming = follow(run, newest) if follows else ()
    for identity, event in chain(kept[-lines:] if lines else (), coming):
        if as_json:
            emit_line({"id": identity, "ms": event[0], "event": event[1]} | event[2])
        else:
            console().print(event_text(event), soft_wrap=True)


def follow(run: Run, last: str | None = None) -> Iterator[tuple[str, Event]]:
    """Yield (id, event) of those after `last`, until the run or the reader of stdout ends."""
    last = last or run.events.newest()
    while True:
        found = run.events.read(last, block_ms=1000)
        for identity, event in found:
            last = identity
            yield identity, event
        if is_unread() or (not found and run.control.state().mode is Mode.FINISH):
            return


def is_unread() -> bool:
    """Return whether the output is a pipe whose reader has ended."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, select.POLLERR)
    except (OSError, ValueError):  # closed, or replaced by a test
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
