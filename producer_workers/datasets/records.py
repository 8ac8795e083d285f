"""A data set of anything with a length and numbered records: a torch Dataset, a table, a list."""

from __future__ import annotations

from typing import Any, Protocol

from buffer.errors import DatasetError
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.record import EXPECTED, ToProblem


class Records(Protocol):
    """What torch calls a map-style data set. The same number gives the same record for as long as the run lives."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RecordsDataset:
    """Rows are the records, each made a problem. The first one is tried at once: a wrong function fails before the run.

    `source` says in errors where the records come from.
    """

    def __init__(self, records: Records, source: str, to_problem: ToProblem) -> None:
        self._records, self._source, self._to_problem = records, source, to_problem
        if not len(records):
            raise DatasetError(f"{source}: there are no records")
        self.row(0)

    def __len__(self) -> int:
        return len(self._records)

    def row(self, row: int, epoch: int = 0) -> Problem:
        if not 0 <= row < len(self):
            raise IndexError(f"{self._source}: row {row} of {len(self)}")
        return make_problem(self._to_problem, self._records[row], f"{self._source}, row {row}")


def make_problem(to_problem: ToProblem, record: Any, where: str) -> Problem:
    """The problem of a record. Raises DatasetError: whatever a user's function may raise, it says of which record."""
    try:
        return to_problem(record)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        hint = f"expected {EXPECTED}; a `record` function may make that of it"
        raise DatasetError(f"{where}: {reason}", hint=hint) from error
