"""Read problems from JSONL and Parquet files.

Every line of JSONL is checked when the file is opened, so that line 40,000 fails before the run;
only offsets stay in memory. Of Parquet, one row group is in memory.
"""

from __future__ import annotations

import json
import os
import re
import threading
from array import array
from bisect import bisect_right
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from buffer.errors import ConfigError, DatasetError
from buffer.imports import install_command
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.records import EXPECTED, ToProblem, make_problem, problem_of

_LONG_NUMBER = re.compile(rb"\d{19}")
# First bytes of files that are not text: what they are, and what to do.
_OTHER_FILES = {
    b"\x1f\x8b": ("compressed by gzip", "run `gunzip --keep {}`"),
    b"\x28\xb5\x2f\xfd": (
        "compressed by zstd",
        "run `zstd -d {}`",
    ),
    b"BZh": ("compressed by bzip2", "run `bunzip2 --keep {}`"),
    b"\xfd7zXZ": ("compressed by xz", "run `xz -dk {}`"),
    b"PAR1": ("Parquet", 'set kind = "parquet"'),
}
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
            self._refuse_other_files(lines)
            self._index(lines)
        if not self._offsets:
            raise DatasetError(f"{path}: the file has no problems", hint=HINT)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, row: int, epoch: int = 0) -> Problem:
        """Return a problem. Raises IndexError, and DatasetError if the file was changed."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        with self._open() as lines:
            if _identity(lines) != self._identity:
                raise DatasetError(
                    f"{self.path}: the file was changed while it was in use",
                    hint="restore it, or start a new run: draws count rows of the original file",
                )
            lines.seek(self._offsets[row])
            return self._parse(lines.readline(), self._line_numbers[row])

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "set path to a JSONL file that this user can read"
            raise DatasetError(f"{self.path}: cannot be opened: {reason}", hint=hint) from error

    def _refuse_other_files(self, lines: BinaryIO) -> None:
        start = lines.read(8)
        lines.seek(0)
        for mark, (kind, hint) in _OTHER_FILES.items():
            if start.startswith(mark):
                message = f"{self.path}: the file is {kind}, not JSON lines"
                raise DatasetError(message, hint=hint.format(self.path))

    def _index(self, lines: BinaryIO) -> None:
        offset = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)

    def _parse(self, line: bytes, number: int) -> Problem:
        where = f"{self.path}:{number}"
        return make_problem(self._to_problem, partial(_record, line), where, HINT)


def _record(line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        ) from error
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg}, character {error.colno}") from error
    if _LONG_NUMBER.search(line):
        # orjson reads larger integers as floats
        json.loads(text, parse_int=_int64)
    return record


def _int64(digits: str) -> int:
    # Python refuses to parse thousands of digits
    number = int(digits) if len(digits) <= 20 else 2**64
    if -(2**63) <= number < 2**64:
        return number
    raise ValueError(f"the integer {digits[:40]} has more than 64 bits: write it as a string")


def _identity(lines: BinaryIO) -> tuple[int, int]:
    # A checksum would read the whole file at every row.
    stat = os.fstat(lines.fileno())
    return stat.st_size, stat.st_mtime_ns


class ParquetRows:
    """The rows of a file or a folder of files, as dicts by number. Thread-safe.

    A shuffled row may read a row group: write small ones for training (`row_group_size=1024`).
    """

    def __init__(self, path: Path) -> None:
        self._parquet = _pyarrow_parquet()
        self._files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not self._files:
            raise DatasetError(f"{path}: the folder has no *.parquet files")
        self._groups: list[tuple[Path, int]] = []
        self._ends: list[int] = []
        self._index()
        self._lock = threading.Lock()
        self._held: tuple[int, Any] = (-1, None)

    def _index(self) -> None:
        sizes = []
        for file in self._files:
            facts = self._open(file).metadata
            self._groups += [(file, number) for number in range(facts.num_row_groups)]
            sizes += [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
        self._ends = list(accumulate(sizes))

    def _open(self, file: Path) -> Any:
        try:
            return self._parquet.ParquetFile(file)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise DatasetError(f"{file}: cannot be read as Parquet: {error}") from error

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def name_row(self, row: int) -> str:
        """Return the file of a row, and its number there."""
        file, _ = self._groups[bisect_right(self._ends, row)]
        first = next(n for n, (other, _) in enumerate(self._groups) if other == file)
        return f"{file}, row {row - (self._ends[first - 1] if first else 0)}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        start = self._ends[group - 1] if group else 0
        with self._lock:  # threads share the held row group
            if self._held[0] != group:
                file, number = self._groups[group]
                self._held = group, self._open(file).read_row_group(number)
            table = self._held[1]
        found: dict[str, Any] = table.slice(row - start, 1).to_pylist()[0]
        return found


def _pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow", hint=install_command("parquet")) from error
    return parquet
