"""Read a folder of Harbor's tasks. Harbor itself checks each task again when it begins a trial.

tasks/fix-bug/task.toml, instruction.md, environment/, tests/test.sh
tasks/two-steps/task.toml with [[steps]], steps/<name>/instruction.md, ...
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from buffer.errors import DatasetError
from producer_workers.config.dataset import HarborSection
from producer_workers.datasets.dataset import Problem

_CONFIG = "task.toml"

# A mark that keeps a task out of training data; Harbor shows it to no agent.
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)?[ \t]*\n)+", re.IGNORECASE)


class HarborTasks:
    """Rows are the tasks, in the order of their names; all are read at once."""

    def __init__(self, folder: Path) -> None:
        """Read the tasks. Raises DatasetError with the file of each fault."""
        folder = folder.absolute()
        tasks = sorted(path.parent for path in folder.glob(f"*/{_CONFIG}"))
        if not tasks:
            hint = f"set path to a folder with one folder for each task, each with a {_CONFIG}"
            raise DatasetError(f"{folder}: there are no tasks of Harbor", hint=hint)
        for path in folder.glob("*/instruction.md"):
            if path.parent not in tasks:
                raise _fault(path.parent / _CONFIG, "is missing")
        self._rows = [_problem(task, folder.name) for task in tasks]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, row: int, epoch: int = 0) -> Problem:
        if row < 0:
            raise IndexError(f"row {row} of {len(self)}")
        return self._rows[row]


def open_tasks(
    section: HarborSection, _folder: Path, _split: str | None, _seed: int
) -> HarborTasks:
    return HarborTasks(section.path)


def _problem(task: Path, source: str) -> Problem:
    file = _instruction(task, _config(task / _CONFIG))
    instruction = _CANARY.sub("", _text(file))
    if not instruction.strip():
        raise _fault(file, "is empty")
    return Problem(
        messages=[{"role": "user", "content": instruction}],
        data_source=source,
        extra={"task_name": task.name, "task_path": str(task)},
    )


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
