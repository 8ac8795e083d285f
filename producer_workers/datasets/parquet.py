"""A data set in Parquet: one file, or a folder of them. Memory holds one row group, whatever the files hold."""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from buffer.errors import ConfigError, DatasetError


class ParquetRows:
    """The rows of the files, as dicts, by number. Safe to share between threads.

    Rows are drawn shuffled, so a row group may be read for each of them: files for training have small ones
    (`row_group_size=1024` when they are written).
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

    def __getitem__(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        start = self._ends[group - 1] if group else 0
        with self._lock:
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
        raise ConfigError("Parquet needs pyarrow", hint="pip install 'rolloutmq[parquet]'") from error
    return parquet
