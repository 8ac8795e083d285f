"""Read a folder of Harbor's tasks. Harbor itself checks each task again when it begins a trial.

tasks/fix-bug/task.toml, instruction.md, environment/, tests/test.sh
tasks/two-steps/task.toml with [[steps]], steps/<name>/instruction.md, ...
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from buffer.errors import DatasetError
from producer_workers.config.dataset import HarborSection
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.records import RecordsDataset, problem_of

_CONFIG = "task.toml"


def open_tasks(section: HarborSection, *_: Any) -> Dataset:
    """Read all tasks of a folder, in the order of their names. Raises DatasetError."""
    folder = section.path.absolute()
    tasks = sorted(path.parent for path in folder.glob(f"*/{_CONFIG}"))
    if not tasks:
        hint = f"set path to a folder with one folder for each task, each with a {_CONFIG}"
        raise DatasetError(f"{folder}: there are no tasks of Harbor", hint=hint)
    for path in folder.glob("*/instruction.md"):
        if path.parent not in tasks:
            raise _fault(path.parent / _CONFIG, "is missing")
    records = [_record(task, folder.name) for task in tasks]
    return RecordsDataset(records, str(folder), problem_of)


def _record(task: Path, source: str) -> dict[str, Any]:
    file = _instruction(task, _config(task / _CONFIG))
    instruction = _text(file)
    if not instruction.strip():
        raise _fault(file, "is empty")
    return {"question": instruction, "data_source": source, "task_path": str(task)}


def _config(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise _fault(file, str(error)) from error


def _instruction(task: Path, config: dict[str, Any]) -> Path:
    """Return the file of the task's instruction, or of its first step's."""
    if "steps" not in config:
        return task / "instruction.md"
    try:
        return task / "steps" / str(config["steps"][0]["name"]) / "instruction.md"
    except (LookupError, TypeError) as error:
        raise _fault(task / _CONFIG, "steps is no list of tables with a name") from error


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError as error:
        raise _fault(file, "is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _fault(file, str(error)) from error


def _fault(file: Path, what: str) -> DatasetError:
    return DatasetError(f"{file}: {what}", hint="a task of Harbor has task.toml and instruction.md")
