"""Read problems from JSONL and Parquet files."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from buffer.errors import ConfigError, DatasetError
from buffer.imports import install_command
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
    """Rows are the lines of a file that are not blank, which is kept in memory.

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
