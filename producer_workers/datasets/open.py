"""Open the data set that a task's configuration names.

One in which a user's code runs, its factory or its `record` function, is read in a process. A row
that hangs or ends the process is refused, and the next row opens the data set again.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from buffer.errors import ConfigError, DatasetError, ProcessUnavailable, UserCodeError
from buffer.imports import import_extra, load_object
from producer_workers.config.dataset import (
    DatasetSection,
    HuggingFaceSection,
    JsonlSection,
    ParquetSection,
    PythonSection,
    ReasoningGymSection,
    RecordsSection,
)
from producer_workers.config.task import HELD_OUT
from producer_workers.datasets.dataset import Dataset, Problem
from producer_workers.datasets.files import HubRows, JsonlDataset, ParquetRows
from producer_workers.datasets.image_records import ImageRecords
from producer_workers.datasets.reasoning_gym import write_problems
from producer_workers.datasets.records import (
    RecordsDataset,
    StreamDataset,
    ToProblem,
    load_to_problem,
    raised_at,
    unusable,
    without_images,
    without_nulls,
)
from producer_workers.user_code.border import Border, Rules, is_marked_inline
from producer_workers.user_code.process_function import BlockingCall, ProcessFunction


def open_dataset(
    section: DatasetSection, problems_dir: Path, split: str | None = None, *, seed: int = 0
) -> Dataset:
    """Open the rows of `split`: None for training, `HELD_OUT` for evaluation.

    `problems_dir` holds generated problems; other data sets have one split. `seed` is for loaders
    that shuffle. User code reads in a process of its own. Raises ConfigError, DatasetError.
    """
    source = source_of_code(section)
    if source is None or not isinstance(section, RecordsSection):
        return open_here(section, problems_dir, split, seed=seed)
    options = {"problems_dir": str(problems_dir), "split": split, "seed": seed}
    return ContainedDataset(section, source, section.row_timeout_s, options)


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


# -- user code, in a process ----------------------------------------------------------------------

_SECTION: TypeAdapter[DatasetSection] = TypeAdapter(DatasetSection)


OPEN_S = 3600.0  # time to open a data set; JSON lines are read whole

LENGTH = -1  # in place of a row


class DatasetBorder(Border):
    """Takes a row and its epoch; returns the problem, or for LENGTH the number of rows."""

    def __init__(self) -> None:
        super().__init__(tuple[int, int])

    def load(self, path: str, options: Mapping[str, Any]) -> Any:
        given = dict(options)
        section = _SECTION.validate_python(given.pop("section"))
        faulthandler.dump_traceback_later(60.0)  # then the log shows where the opening is
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


# -- the readers of the kinds ---------------------------------------------------------------------


def open_jsonl(section: JsonlSection, *_: Any) -> Dataset:
    return JsonlDataset(section.path, with_images(section), section.largest_row)


def open_parquet(section: ParquetSection, *_: Any) -> Dataset:
    largest = section.largest_row
    rows = ParquetRows(section.path, largest)
    to_problem = with_images(section, of_table=True)
    return RecordsDataset(rows, str(section.path), to_problem, rows.name_row, largest)


def open_hugging_face(section: HuggingFaceSection, *_: Any) -> Dataset:
    largest = section.largest_row
    to_problem = with_images(section, of_table=True)
    datasets = import_extra("datasets", "a data set of kind hugging_face")
    folder = str(_folder_of(section))
    found: Any
    try:
        if section.repository:
            found = datasets.load_dataset(folder, section.subset, split=section.split)
        else:
            found = datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{section.path}: {error}",
            hint="set path to a data set on the Hub, and subset if it has several; or to a folder "
            "that `save_to_disk` wrote",
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if section.split not in found:
            raise ConfigError(
                f"{section.path} has no split {section.split!r}",
                hint=f"set split to one of {sorted(found)}",
            )
        found = found[section.split]
    rows = HubRows(found, largest)
    return RecordsDataset(rows, str(section.path), to_problem, largest=largest)


def open_python(section: PythonSection, _folder: Path, _split: str | None, seed: int) -> Dataset:
    """Open an object of the user's: numbered rows, or a stream."""
    to_problem = with_images(section)
    factory = load_object(section.factory, kind="data set")
    try:
        made = factory(**section.options)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise unusable(f"data set {section.factory!r}", error) from error
    if not isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
        hint = "return an object with a length and [row], or an iterable"
        raise ConfigError(f"{section.factory} made a {type(made).__name__}", hint=hint)
    largest = section.largest_row
    # torch's IterableDataset inherits a __getitem__ that only raises
    only_iterates = any(base.__name__ == "IterableDataset" for base in type(made).__mro__)
    if hasattr(made, "__getitem__") and hasattr(made, "__len__") and not only_iterates:
        return RecordsDataset(made, section.factory, to_problem, largest=largest)
    return StreamDataset(
        made, section.factory, to_problem, seed=seed, rows=section.rows, largest=largest
    )


def open_generated(
    section: ReasoningGymSection, problems_dir: Path, split: str | None, _seed: int
) -> Dataset:
    """Open problems of reasoning-gym, and write those that are missing."""
    if split not in (None, HELD_OUT):
        raise ConfigError(f"there is no split {split!r}", hint=f"{HELD_OUT}, or none for training")
    if split == HELD_OUT and not section.held_out_size:
        raise ConfigError(
            f"task {section.name!r} has no held-out problems", hint="set held_out_size"
        )
    files = write_problems(section, problems_dir)
    return JsonlDataset(files.held_out if split == HELD_OUT else files.train)


def with_images(section: RecordsSection, *, of_table: bool = False) -> ToProblem:
    to_problem = load_to_problem(section.record, section.fields)
    if of_table:
        to_problem = without_nulls(to_problem)
    if section.images is None:
        return without_images(to_problem)
    folder = _folder_of(section)
    root = folder if folder.is_dir() else folder.parent
    return ImageRecords(to_problem, section.images, root)


def _folder_of(section: RecordsSection) -> Path:
    """Return the file or folder of the rows on this machine; `.` for rows that are made."""
    if section.repository:
        return section.repository.folder()
    return section.files or Path()
