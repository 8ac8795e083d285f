"""Number the episodes of an environment of OpenEnv: each row is one call of its `reset`."""

from __future__ import annotations

from typing import Any

from producer_workers.config.dataset import OpenEnvSection
from producer_workers.datasets.dataset import Dataset, Problem
from producer_workers.datasets.records import RecordsDataset

NOTHING_ASKED = {"role": "user", "content": ""}


def open_resets(section: OpenEnvSection, *_: Any) -> Dataset:
    """Return the episodes by number; the first observation is their question."""

    def problem(number: int) -> Problem:
        reset = {**section.reset, section.numbered_by: number}
        return Problem(messages=[NOTHING_ASKED], data_source="openenv", extra={"reset": reset})

    numbers = range(section.first, section.first + section.size)
    return RecordsDataset(numbers, section.url, problem)
