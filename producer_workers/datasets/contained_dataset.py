"""Read a data set in which a user's code runs, its factory or its `record` function, in a process.

A row that hangs or ends the process is refused, and the next row opens the data set again. One call
reads several rows.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from buffer.errors import ConfigError, DatasetError, ProcessUnavailable, UserCodeError
from buffer.imports import load_object
from producer_workers.config.dataset import DatasetSection
from producer_workers.datasets.dataset import Dataset, Problem, RowPlace
from producer_workers.datasets.records import raised_at
from producer_workers.user_code.border import Border, Rules, is_marked_inline
from producer_workers.user_code.process_function import BlockingCall, ProcessFunction

_SECTION: TypeAdapter[DatasetSection] = TypeAdapter(DatasetSection)


AHEAD = 32  # rows that are read in one call, while they take no longer than `AHEAD_S`

AHEAD_S = 0.1

OPEN_S = 3600.0  # time to open a data set; JSON lines are read whole

SHOW_S = 60.0  # time after which the log shows where the opening is


class DatasetBorder(Border):
    """Takes places of rows, none for the length; returns their problems."""

    def __init__(self) -> None:
        super().__init__(tuple[list[tuple[int, int]]])

    def load(self, path: str, options: Mapping[str, Any]) -> Any:
        from producer_workers.datasets.open import open_here

        given = dict(options)
        section = _SECTION.validate_python(given.pop("section"))
        faulthandler.dump_traceback_later(SHOW_S)
        try:
            return open_here(section, Path(given.pop("problems_dir")), **given)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def call(self, function: Any, *arguments: Any) -> Any:
        (places,) = arguments
        return _read(function, places) if places else len(function)

    def check(self, name: str, result: Any, *arguments: Any) -> Any:
        return result if isinstance(result, int) else [_plain(each) for each in result]

    def result(self, plain: Any) -> Any:
        return plain if isinstance(plain, int) else [_problem(each) for each in plain]


DATASET = DatasetBorder()


def _read(dataset: Dataset, places: Sequence[tuple[int, int]]) -> list[Problem | ConfigError]:
    """Return the first row, and more rows for a while. Raises what the first row raises."""
    until_s = time.monotonic() + AHEAD_S
    made: list[Problem | ConfigError] = []
    for row, epoch in places:
        try:
            made.append(dataset.row(row, epoch))
        except ConfigError as error:  # a value: it names the row already
            made.append(error)
        except BaseException:  # raised when it is the first
            if not made:
                raise
            break
        if time.monotonic() > until_s:
            break
    return made


def _plain(made: Problem | ConfigError) -> dict[str, Any]:
    if isinstance(made, ConfigError):
        return {"refused": [made.message, made.hint]}
    plain = made.model_dump()
    plain["images"] = [str(each) if isinstance(each, Path) else each for each in made.images]
    return plain


def _problem(plain: dict[str, Any]) -> Problem | DatasetError:
    if refused := plain.get("refused"):
        return DatasetError(refused[0], hint=refused[1])
    return Problem(**plain)


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
        self._ahead: dict[tuple[int, int], Problem | DatasetError] = {}
        self._one_by_one = 0
        try:
            self._rows = int(self._call([]))
        except (UserCodeError, ProcessUnavailable) as error:
            raise _unusable(error) from error

    def __len__(self) -> int:
        return self._rows

    def row(self, row: int, epoch: int = 0) -> Problem:
        return self.row_of([RowPlace(epoch, row)])

    def row_of(self, places: Iterable[RowPlace]) -> Problem:
        """Return the problem at the first of `places`; the others will probably be asked next."""
        coming = iter(places)
        epoch, row = next(coming)
        if not 0 <= row < self._rows:
            raise IndexError(f"{self._code}: row {row} of {self._rows}")
        with self._lock:
            found = self._ahead.pop((row, epoch), None) or self._ask(row, epoch, coming)
        if isinstance(found, DatasetError):
            raise found
        return found

    def _ask(self, row: int, epoch: int, coming: Iterator[RowPlace]) -> Problem | DatasetError:
        """Return one row and keep those behind it; if one of these fails, ask for the row alone."""
        self._ahead.clear()
        # another epoch may be another pass over a stream
        near = [(p.row, epoch) for p in takewhile(lambda place: place.epoch == epoch, coming)]
        self._one_by_one = max(0, self._one_by_one - 1)
        if near and not self._one_by_one:
            try:
                return self._take([(row, epoch), *near])
            except (UserCodeError, ProcessUnavailable):
                self._one_by_one = AHEAD
        try:
            return self._take([(row, epoch)])
        except (UserCodeError, ProcessUnavailable) as error:
            return _unusable(error, f"row {row}: ")

    def _take(self, places: list[tuple[int, int]]) -> Problem | DatasetError:
        made = self._call(places)
        self._ahead = dict(zip(places, made, strict=False))
        return self._ahead.pop(places[0])


def _unusable(error: UserCodeError | ProcessUnavailable, before: str = "") -> DatasetError:
    """Return the error of a row that a user's code did not give, with the places in this code."""
    frames = error.frames.splitlines() if isinstance(error, UserCodeError) else []
    return DatasetError(before + error.message, hint=raised_at(frames) or error.hint)


def source_of_code(section: DatasetSection) -> str | None:
    """Return the user's code that reads a data set, None if it is inline. Raises ConfigError."""
    named = {spec: load_object(spec, kind=kind) for kind, spec in section.code.items()}
    unsafe = [spec for spec, function in named.items() if not is_marked_inline(function)]
    return unsafe[0] if unsafe else None
