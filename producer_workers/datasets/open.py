"""From the `dataset` of a task's configuration to a data set."""

from __future__ import annotations

from pathlib import Path

from buffer.errors import ConfigError
from buffer.run_config import HELD_OUT, DatasetSection, ReasoningGymDataset
from producer_workers.datasets.dataset import Dataset
from producer_workers.datasets.jsonl import JsonlDataset
from producer_workers.datasets.reasoning_gym_problems import write_problems


def open_dataset(section: DatasetSection, problems_dir: Path, split: str | None = None) -> Dataset:
    """The rows of `split`: None for training, `HELD_OUT` for evaluation. Raises ConfigError.

    `problems_dir` holds generated problems and is filled where it is not. A JSONL file is one split whole:
    an evaluation task names a file of its own.
    """
    if not isinstance(section, ReasoningGymDataset):
        return JsonlDataset(section.path)
    if split not in (None, HELD_OUT):
        raise ConfigError(f"there is no split {split!r}", hint=f"{HELD_OUT}, or none for training")
    if split == HELD_OUT and not section.held_out_size:
        raise ConfigError(f"task {section.name!r} has no held-out problems", hint="set held_out_size")
    files = write_problems(section, problems_dir)
    return JsonlDataset(files.held_out if split == HELD_OUT else files.train)
