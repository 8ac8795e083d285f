"""Open the data set that a task's configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from buffer.errors import ConfigError, DatasetError
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
from producer_workers.datasets.contained_dataset import ContainedDataset, open_here, source_of_code
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.files import HubRows, JsonlDataset, ParquetRows
from producer_workers.datasets.image_records import ImageRecords
from producer_workers.datasets.reasoning_gym import write_problems
from producer_workers.datasets.records import (
    RecordsDataset,
    ToProblem,
    load_to_problem,
    unusable,
    without_images,
    without_nulls,
)
from producer_workers.datasets.stream import StreamDataset


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
