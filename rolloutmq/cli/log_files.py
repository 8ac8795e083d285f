"""Read the log files of a run's processes: the last lines, then what is added.

    logs/NAME.log      the newest lines of a process, in all its lives
    logs/NAME.log.1    older ones: `rolloutmq run` copies NAME.log there, and cuts it to nothing

Lines in JSON have a time. Any other line, of a library or a traceback, belongs to the one above it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

OUTPUT = "run"
"""The log of `rolloutmq run --detach` itself: lines for people, shown only when it is named."""

_BLOCK = 1 << 16
_SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a log; `fields` is empty for one that is not JSON. `time`: ISO, local."""

    time: str
    role: str
    line: str
    fields: dict[str, Any]


class LogFiles:
    """Reads the logs of the processes whose name is `role`, or begins with it and a hyphen.

    An empty `role` is all but `OUTPUT`.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self._folder = folder
        self._role = role
        self._read: dict[Path, int] = {}
        self._times: dict[Path, str] = {}

    @property
    def roles(self) -> list[str]:
        """Return the names of the processes that have a log."""
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
        if path.stat().st_size < position:
            # cut since the last call: what was not read yet is at the end of the older file
            rest = _from(_older(path), position)[0]
            self._read[path] = 0
        else:
            rest = []
        lines, size = _from(path, self._read.get(path, 0))
        self._read[path] = self._read.get(path, 0) + size
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
    """Return the whole lines behind a position, and their bytes."""
    if not path.exists():
        return [], 0
    with path.open("rb") as log:
        log.seek(position)
        whole, newline, _ = log.read().rpartition(b"\n")
    return whole.splitlines() if newline else [], len(whole) + len(newline)


def _last_lines(path: Path, lines: int) -> tuple[list[bytes], int]:
    """Return the last whole lines of a file, read from its end, and the position behind them."""
    if not path.exists():
        return [], 0
    with path.open("rb") as log:
        size = position = log.seek(0, 2)
        tail = b""
        while position and tail.count(b"\n") <= lines:
            start = max(0, position - _BLOCK)
            log.seek(start)
            tail = log.read(position - start) + tail
            position = start
    whole, _, partial = tail.rpartition(b"\n")
    found = whole.splitlines()
    return found[max(0, len(found) - max(0, lines)) :], size - len(partial)
