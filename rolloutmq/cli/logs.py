"""`rolloutmq logs`: the logs of a run's processes, merged by time."""

from __future__ import annotations

import heapq
import select
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.text import Text

from buffer.control.control import Mode
from buffer.control.events import START, Event
from buffer.errors import ConfigError
from buffer.run import Run
from rolloutmq.command_list import command
from rolloutmq.options import RUNS, AsJson, RunDir, Target, on_run
from rolloutmq.output import console, emit_line, version_style
from rolloutmq.run_owner import choose_folder, is_owned
from rolloutmq.views.screen import event_text

EPILOG = """
\b
Examples: rolloutmq logs
          rolloutmq logs worker -f
          rolloutmq logs trainer -n 1000 --run-dir runs/demo
"""

POLL_S = 0.3
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
        if field not in _SHOWN:
            start.append(f"  {field} ", style="dim").append(_value(value))
    if trace := entry.fields.get("exception"):
        start.append("\n" + str(trace), style="dim")
    return start


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


_BLOCK_MS = 1000


@command(
    "Look", "tail", epilog="Example: rolloutmq tail --json | jq 'select(.event == \"reaped\")'"
)
@on_run
def tail(
    target: Target,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Start with the oldest event that is kept.")
    ] = False,
    events: Annotated[
        int | None, typer.Option("--count", min=1, help="Exit after N events.", metavar="N")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow the events of a run, until it is finished or Ctrl-C."""
    for identity, event in islice(follow(target.run, from_start=from_start), events):
        if as_json:
            emit_line({"id": identity, "ms": event[0], "event": event[1]} | event[2])
        else:
            console().print(event_text(event), soft_wrap=True)


def follow(run: Run, *, from_start: bool) -> Iterator[tuple[str, Event]]:
    """Yield (id, event), old ones if `from_start`, until the run or the reader of stdout ends."""
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
    except (OSError, ValueError):  # closed, or replaced by a test
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


# the log of `rolloutmq run --detach` itself: for people, and shown only when it is named
OUTPUT = "run"
_SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a log; `fields` is empty if the line is not JSON. `time`: ISO, local."""

    time: str
    role: str
    line: str
    fields: dict[str, Any]


class LogFiles:
    """Reads the logs of processes named `role` or `role-…`; an empty `role` is all but `OUTPUT`."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder = folder
        self._role = role
        self._read: dict[Path, int] = {}
        self._times: dict[Path, str] = {}

    @property
    def roles(self) -> list[str]:
        return [_name(path) for path in self._files()]

    def last(self, lines: int) -> list[Entry]:
        """Return the last lines of all files together, oldest first."""
        parts = []
        for path in self._files():
            newest, self._read[path] = _last_lines(path, lines)
            older, _ = _last_lines(_older(path), lines - len(newest))
            parts.append(self._entries(path, older + newest))
        # in this order, a line without a time of its own stays behind the one above it
        merged = list(heapq.merge(*parts, key=lambda entry: entry.time))
        return merged[len(merged) - min(lines, len(merged)) :]

    def new(self) -> list[Entry]:
        """Return the whole lines that were added since the last call, oldest first."""
        parts = [self._entries(path, self._added(path)) for path in self._files()]
        return list(heapq.merge(*parts, key=lambda entry: entry.time))

    def _files(self) -> list[Path]:
        found = self._folder.glob(f"*{_SUFFIX}") if self._folder.is_dir() else []
        return sorted(path for path in found if self._is_wanted(_name(path)))

    def _is_wanted(self, name: str) -> bool:
        if not self._role:
            return name != OUTPUT
        return name == self._role or name.startswith(f"{self._role}-")

    def _added(self, path: Path) -> list[bytes]:
        position = self._read.get(path, 0)
        rest: list[bytes] = []
        if path.stat().st_size < position:
            # cut since the last call: what was not read yet is at the end of the older file
            rest = _from(_older(path), position)[0]
            position = 0
        lines, size = _from(path, position)
        self._read[path] = position + size
        return rest + lines

    def _entries(self, path: Path, lines: Iterable[bytes]) -> list[Entry]:
        entries = []
        for line in lines:
            fields = _fields(line)
            time = str(fields.get("time", self._times.get(path, "")))
            self._times[path] = time
            text = line.decode(errors="replace").rstrip()
            if text:
                entries.append(Entry(time, _name(path), text, fields))
        return entries


def _name(path: Path) -> str:
    return path.name.removesuffix(_SUFFIX)


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _from(path: Path, position: int) -> tuple[list[bytes], int]:
    """Return the whole lines after a position, and their bytes."""
    if not path.exists():
        return [], 0
    with path.open("rb") as log:
        log.seek(position)
        whole, newline, _ = log.read().rpartition(b"\n")
    return whole.splitlines() if newline else [], len(whole) + len(newline)


def _last_lines(path: Path, lines: int) -> tuple[list[bytes], int]:
    """Return the last whole lines, and the position after them."""
    if not path.exists():
        return [], 0
    with path.open("rb") as log:
        found = [*deque(log, maxlen=lines + 1)]  # the last one may be partial
        position = log.tell()
    if found and not found[-1].endswith(b"\n"):
        position -= len(found.pop())
    return found[max(0, len(found) - lines) :], position
