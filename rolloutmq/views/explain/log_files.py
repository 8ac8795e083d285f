"""The logs of a run's processes on this machine: newest lines and new ones, merged by time.

Only the last MOST_BYTES of a log are read; they may begin in its older file (`….log.1`).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from pathlib import Path
from time import localtime, strftime
from typing import Any

import orjson

from consumer.handle.step_log import read_steps

# the log of `rolloutmq run --detach` itself: for people, and shown only when it is named
OUTPUT = "run"
FIELDS_OF_ALL = frozenset({"time", "level", "run", "role", "id", "logger", "message", "exception"})
LEVELS = ("debug", "info", "warning", "error", "critical")
MOST_BYTES = 16 << 20
FIRST_BYTES = 256 << 10  # read first; four times as much each time that it has too few lines
_SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a log; `fields` is empty if the line is not JSON. `time`: ISO, local."""

    time: str
    role: str
    line: str
    fields: dict[str, Any]

    @property
    def level(self) -> str:
        """The level; "warning" for a line that is not JSON: it may belong to a traceback."""
        level = self.fields.get("level")
        return level if level in LEVELS else "warning"


@dataclass(frozen=True)
class LogFilter:
    """Conditions that a line must meet; an empty one is met by every line.

    Times are compared as texts. `about` is a group id, a worker, or the number of a train step. A
    line that was written between the two times of `within` is about it, too.
    """

    level: str = ""
    about: str = ""
    text: str = ""
    since: str = ""
    until: str = ""
    within: tuple[str, str] | None = None

    def passes(self, entry: Entry) -> bool:
        time = entry.time
        return (
            (not self.level or LEVELS.index(entry.level) >= LEVELS.index(self.level))
            and self.since <= time
            and (not self.until or time <= self.until)
            and self.text.casefold() in entry.line.casefold()
            and (
                not self.about
                or bool(self.within and self.within[0] < time <= self.within[1])
                or bool(self._pattern.search(entry.line))
            )
        )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        if self.about.isdecimal():
            return re.compile(rf'\bstep(":| ){self.about}\b')
        return re.compile(rf"(?<![\w.-]){re.escape(self.about)}(?!\w)")


def filter_about(folder: Path, about: str) -> LogFilter:
    """Return a filter for lines about something; about a train step: all lines written in it."""
    if not about.isdecimal():
        return LogFilter(about=about)
    for step in read_steps(folder):
        if str(step.step) == about and step.began_s and step.ended_s:
            return LogFilter(about=about, within=(_clock(step.began_s), _clock(step.ended_s)))
    return LogFilter(about=about)


def _clock(seconds: float) -> str:
    milliseconds = int(seconds * 1000) % 1000
    return strftime("%Y-%m-%dT%H:%M:%S", localtime(seconds)) + f".{milliseconds:03d}"


class LogFiles:
    """Reads the logs of processes named `role` or `role-…`; "": all logs but `OUTPUT`."""

    def __init__(self, folder: Path, role: str) -> None:
        self.folder = folder
        self._role = role
        self._read: dict[Path, int] = {}
        self._times: dict[Path, str] = {}
        self.is_cut = False  # whether `last` has left out lines that were too far back

    @property
    def roles(self) -> list[str]:
        return [_name(path) for path in self._files()]

    def last(self, lines: int, wanted: LogFilter | None = None) -> list[Entry]:
        """Return the last lines of all files together, oldest first."""
        # in this order, a line without a time of its own stays behind the one above it
        parts = [self._last(path, lines, wanted or LogFilter()) for path in self._files()]
        merged = list(heapq.merge(*parts, key=lambda entry: entry.time))
        return merged[len(merged) - min(lines, len(merged)) :]

    def new(self, wanted: LogFilter | None = None) -> list[Entry]:
        """Return the whole lines that were added since the last call, oldest first."""
        parts = [self._entries(path, self._added(path)) for path in self._files()]
        merged = heapq.merge(*parts, key=lambda entry: entry.time)
        return [entry for entry in merged if wanted is None or wanted.passes(entry)]

    def _files(self) -> list[Path]:
        found = self.folder.glob(f"*{_SUFFIX}") if self.folder.is_dir() else []
        if not self._role:
            return sorted(path for path in found if _name(path) != OUTPUT)
        return sorted(path for path in found if f"{_name(path)}-".startswith(f"{self._role}-"))

    def _last(self, path: Path, lines: int, wanted: LogFilter) -> list[Entry]:
        size = FIRST_BYTES
        while True:
            self._times.pop(path, None)
            found, self._read[path], is_whole = _end_of(path, size)
            every = self._entries(path, found)
            if not is_whole:  # the first lines may belong to a line further back, and have its time
                every = list(dropwhile(lambda entry: not entry.fields, every))
            entries = [entry for entry in every if wanted.passes(entry)]
            if len(entries) >= lines or is_whole or size >= MOST_BYTES:
                self.is_cut |= not is_whole and len(entries) < lines
                return entries[max(0, len(entries) - lines) :]
            size *= 4

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


def _end_of(path: Path, size: int) -> tuple[list[bytes], int, bool]:
    """Return the whole lines at the end, the position after them, and whether these are all."""
    start = max(0, path.stat().st_size - size)
    lines, read = _from(path, start)
    if start:
        return lines[1:], start + read, False
    older = _older(path)
    first = max(0, older.stat().st_size - (size - read)) if older.exists() else 0
    before, _ = _from(older, first)
    return before[1 if first else 0 :] + lines, read, not first
