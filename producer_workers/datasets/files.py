"""Read problems from JSONL and Parquet files, which are kept in memory."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from buffer.errors import DatasetError
from buffer.imports import import_extra
from producer_workers.datasets.records import RecordsDataset, ToProblem, problem_of

# First bytes of files that are not text: what they are, and what to do.
_OTHER_FILES = {
    b"\x1f\x8b": ("compressed by gzip", "run `gunzip --keep {}`"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "run `zstd -d {}`"),
    b"BZh": ("compressed by bzip2", "run `bunzip2 --keep {}`"),
    b"\xfd7zXZ": ("compressed by xz", "run `xz -dk {}`"),
    b"PAR1": ("Parquet", 'set kind = "parquet"'),
}


class JsonlDataset(RecordsDataset):
    """Rows are the lines of a file that are not blank.

    Every line is checked when the file is opened, so that line 40,000 fails before the run.
    """

    def __init__(self, path: Path, to_problem: ToProblem = problem_of) -> None:
        rows = JsonRows(path)
        super().__init__(rows, str(path), to_problem, rows.name_row)
        for row in range(1, len(rows)):
            self.row(row)


class JsonRows:
    """The values of the lines that are not blank, by number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            data = path.read_bytes()
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "set path to a JSONL file that this user can read"
            raise DatasetError(f"{path}: cannot be opened: {reason}", hint=hint) from error
        for mark, (kind, hint) in _OTHER_FILES.items():
            if data.startswith(mark):
                message = f"{path}: the file is {kind}, not JSON lines"
                raise DatasetError(message, hint=hint.format(path))
        lines = enumerate(data.split(b"\n"), start=1)
        self._lines = [(number, line) for number, line in lines if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def name_row(self, row: int) -> str:
        """Return the file of a row, and its line."""
        return f"{self._path}:{self._lines[row][0]}"

    def __getitem__(self, row: int) -> Any:
        try:
            # keeps long integers, which orjson would round
            return json.loads(self._lines[row][1].decode(), parse_constant=_refuse)
        except ValueError as error:
            raise ValueError(f"the line is not JSON in UTF-8: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


class ParquetRows:
    """The rows of a file or a folder of files, as dicts by number."""

    def __init__(self, path: Path) -> None:
        self._files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not self._files:
            raise DatasetError(f"{path}: the folder has no *.parquet files")
        self._tables = [_read_table(file) for file in self._files]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def name_row(self, row: int) -> str:
        """Return the file of a row, and its number there."""
        file, row = self._find(row)
        return f"{self._files[file]}, row {row}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, row = self._find(row)
        found: dict[str, Any] = self._tables[file].slice(row, 1).to_pylist()[0]
        return found

    def _find(self, row: int) -> tuple[int, int]:
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def _read_table(file: Path) -> Any:
    parquet = import_extra("pyarrow.parquet", "a Parquet file")
    try:
        return parquet.read_table(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DatasetError(f"{file}: cannot be read as Parquet: {error}") from error
