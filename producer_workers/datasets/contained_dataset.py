"""Read a data set in which a user's code runs, its factory or its `record` function, in a process.

A row that hangs or ends the process is refused, and the next row opens the data set again.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from buffer.errors import ConfigError, DatasetError, ProcessUnavailable, UserCodeError
from buffer.imports import load_object
from producer_workers.config.dataset import DatasetSection
from producer_workers.datasets.dataset import Dataset, Problem
from producer_workers.datasets.records import raised_at
from producer_workers.user_code.border import Border, Rules, is_marked_inline
from producer_workers.user_code.process_function import BlockingCall, ProcessFunction

_SECTION: TypeAdapter[DatasetSection] = TypeAdapter(DatasetSection)


OPEN_S = 3600.0  # time to open a data set; JSON lines are read whole

SHOW_S = 60.0  # time after which the log shows where the opening is

LENGTH = -1  # in place of a row


class DatasetBorder(Border):
    """Takes a row and its epoch; returns the problem, or for LENGTH the number of rows."""

    def __init__(self) -> None:
        super().__init__(tuple[int, int])

    def load(self, path: str, options: Mapping[str, Any]) -> Any:
        given = dict(options)
        section = _SECTION.validate_python(given.pop("section"))
        faulthandler.dump_traceback_later(SHOW_S)
        try:
            return open_here(section, Path(given.pop("problems_dir")), **given)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def call(self, function: Any, *arguments: Any) -> Any:
        row, epoch = arguments
        try:
            return len(function) if row == LENGTH else function.row(row, epoch)
        except ConfigError as error:  # a value: it names the row already
            return error

    def check(self, name: str, result: Any, *arguments: Any) -> Any:
        if isinstance(result, ConfigError):
            return {"refused": [result.message, result.hint]}
        if isinstance(result, int):
            return result
        images = [str(each) if isinstance(each, Path) else each for each in result.images]
        return result.model_dump() | {"images": images}

    def result(self, plain: Any) -> Any:
        if isinstance(plain, int):
            return plain
        if refused := plain.get("refused"):
            raise DatasetError(refused[0], hint=refused[1])
        return Problem(**plain)


DATASET = DatasetBorder()


class ContainedDataset:
    """The data set of `section`, opened in a process. Thread-safe. Raises DatasetError.

    `code`: its name in errors; `limit_s`: for a row.
    """

    def __init__(
        self, section: DatasetSection, code: str, limit_s: float, options: Mapping[str, Any]
    ) -> None:
        rules = Rules(
            what=f"the data set of {code}",
            name=code,
            limit_s=limit_s,
            limit_key="[tasks.<name>.dataset] row_timeout_s",
            start_s=OPEN_S,
            hint="see the record function, or the factory",
        )
        given = {"section": section.model_dump(mode="json"), **options}
        self._call = BlockingCall(ProcessFunction(code, f"{__name__}:DATASET", rules, given))
        self._code = code
        self._lock = threading.Lock()
        self._rows = int(self._ask(LENGTH, 0, ""))

    def __len__(self) -> int:
        return self._rows

    def row(self, row: int, epoch: int = 0) -> Problem:
        if not 0 <= row < self._rows:
            raise IndexError(f"{self._code}: row {row} of {self._rows}")
        problem: Problem = self._ask(row, epoch, f"row {row}: ")
        return problem

    def _ask(self, row: int, epoch: int, where: str) -> Any:
        try:
            with self._lock:
                return self._call(row, epoch)
        except (UserCodeError, ProcessUnavailable) as error:
            hint = raised_at(error) or error.hint
            raise DatasetError(where + error.message, hint=hint) from error


def open_here(
    section: DatasetSection, problems_dir: Path, split: str | None = None, *, seed: int = 0
) -> Dataset:
    """Open a data set in this process."""
    opened: Dataset = load_object(section.reader, kind="data set")(
        section, problems_dir, split, seed
    )
    return opened


def source_of_code(section: DatasetSection) -> str | None:
    """Return the code that reads a data set in a process; None if it is inline or ours.

    Raises ConfigError.
    """
    if section.package:
        return section.package
    named = {spec: load_object(spec, kind=kind) for kind, spec in section.code.items()}
    unsafe = [spec for spec, function in named.items() if not is_marked_inline(function)]
    return unsafe[0] if unsafe else None
