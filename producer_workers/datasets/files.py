"""Read problems from JSONL and Parquet files, which are kept in memory."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import Counter
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from buffer.errors import DatasetError
from buffer.imports import import_extra
from buffer.readable import format_size
from producer_workers.config.dataset import LARGEST_ROW
from producer_workers.datasets.records import RecordsDataset, ToProblem, check_size, problem_of

log = logging.getLogger("rolloutmq.producer")

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

    def __init__(
        self, path: Path, to_problem: ToProblem = problem_of, largest: int = LARGEST_ROW
    ) -> None:
        rows = JsonRows(path, largest)
        super().__init__(rows, str(path), to_problem, rows.name_row, largest)
        for row in range(1, len(rows)):
            self.try_row(row)


class JsonRows:
    """The values of the lines that are not blank, by number."""

    def __init__(self, path: Path, largest: int) -> None:
        self._path = path
        self._lines: list[tuple[int, bytes]] = []
        try:
            with path.open("rb") as file:
                # no more of a line than it may have
                lines = iter(partial(file.readline, largest + 1), b"")
                for number, line in enumerate(lines, 1):
                    for mark, (kind, hint) in _OTHER_FILES.items() if number == 1 else ():
                        if line.startswith(mark):
                            what = f"{path}: the file is {kind}, not JSON lines"
                            raise DatasetError(what, hint=hint.format(path))
                    if len(line) > largest:
                        what = f"{path}:{number}: the row has more than {format_size(largest)}"
                        hint = "leave it out, or move what is large into a file"
                        raise DatasetError(what, hint=hint)
                    if line.strip():
                        self._lines.append((number, line))
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "set path to a JSONL file that this user can read"
            raise DatasetError(f"{path}: cannot be opened: {reason}", hint=hint) from error

    def __len__(self) -> int:
        return len(self._lines)

    def name_row(self, row: int) -> str:
        """Return the file of a row, and its line."""
        return f"{self._path}:{self._lines[row][0]}"

    def __getitem__(self, row: int) -> Any:
        try:
            # keeps long integers, which orjson would round
            return json.loads(
                self._lines[row][1].decode(), parse_constant=_refuse, object_pairs_hook=_distinct
            )
        except ValueError as error:
            raise ValueError(f"the line is not JSON in UTF-8: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        (name, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {name[:80]!r} is written twice in one object")
    return made


class ParquetRows:
    """The rows of a file or a folder of files, as dicts by number; hidden files are none of it."""

    def __init__(self, path: Path, largest: int = LARGEST_ROW) -> None:
        self._largest = largest
        self._files = sorted(path.glob("[!.]*.parquet")) if path.is_dir() else [path]
        if dangling := [file for file in self._files if file.is_symlink() and not file.exists()]:
            log.warning("left out: links that lead nowhere: %s", ", ".join(map(str, dangling)))
            self._files = [file for file in self._files if file not in dangling]
        if not self._files:
            raise DatasetError(f"{path}: the folder has no *.parquet files")
        parquet = import_extra("pyarrow.parquet", "a Parquet file")
        self._tables = []
        for file in self._files:
            try:
                self._tables.append(parquet.read_table(file))
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                raise DatasetError(f"{file}: cannot be read as Parquet: {error}") from error
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def name_row(self, row: int) -> str:
        """Return the file of a row, and its number there."""
        file, row = self._find(row)
        return f"{self._files[file]}, row {row}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, row = self._find(row)
        found = self._tables[file].slice(row, 1)
        check_size(found.nbytes, self._largest)
        (record,) = found.to_pylist()
        return cast(dict[str, Any], record)

    def _find(self, row: int) -> tuple[int, int]:
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


class HubRows:
    """The rows of a data set of the package `datasets`."""

    def __init__(self, rows: Any, largest: int) -> None:
        self._rows = rows
        self._tables = rows.with_format("arrow")
        self._largest = largest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        check_size(self._tables[row].nbytes, self._largest)
        return self._rows[row]
