"""A data set in a JSONL file: one problem a line.

Every line is checked once, when the file is opened, so that line 40,000 fails before the run and not during
it. Of each line only the offset is kept; rows are read when they are drawn.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from buffer.errors import DatasetError
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.record import EXPECTED, ToProblem, problem_of

HINT = f"expected one JSON object a line, in UTF-8: {EXPECTED}"


class JsonlDataset:
    """Rows are the lines of a file that are not blank. Raises DatasetError (file, line, reason)."""

    def __init__(self, path: Path, to_problem: ToProblem = problem_of) -> None:
        self.path = path
        self._to_problem = to_problem
        self._offsets = array("q")
        self._line_numbers = array("q")
        with self._open() as lines:
            self._identity = _identity(lines)
            self._index(lines)
        if not self._offsets:
            raise DatasetError(f"{path}: the file has no problems", hint=HINT)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, row: int, epoch: int = 0) -> Problem:
        """The problem of row `row`. Raises IndexError, and DatasetError if the file was changed."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        with self._open() as lines:
            if _identity(lines) != self._identity:
                raise DatasetError(
                    f"{self.path}: the file was changed while it was in use",
                    hint="put it back, or start a new run: draws count rows of the file as it was",
                )
            lines.seek(self._offsets[row])
            return self._parse(lines.readline(), self._line_numbers[row])

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "give the path of a JSONL file that this user can read"
            raise DatasetError(f"{self.path}: cannot be opened: {reason}", hint=hint) from error

    def _index(self, lines: BinaryIO) -> None:
        offset = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)

    def _parse(self, line: bytes, number: int) -> Problem:
        try:
            return self._to_problem(_record(line))
        except ValueError as error:
            raise DatasetError(f"{self.path}:{number}: {error}", hint=HINT) from error


def _record(line: bytes) -> Any:
    """One line as a value. Raises ValueError with the reason."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}") from error
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, character {error.colno}") from error


def _identity(lines: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(lines.fileno())
    return stat.st_size, stat.st_mtime_ns
