"""Number the episodes of an environment of OpenEnv: each row is one call of its `reset`."""

from __future__ import annotations

from pathlib import Path

from producer_workers.config.dataset import OpenEnvSection
from producer_workers.datasets.dataset import Problem

NOTHING_ASKED = {"role": "user", "content": ""}


class NumberedResets:
    """Rows have the arguments of `reset` in `extra`; the first observation is their question."""

    def __init__(self, section: OpenEnvSection) -> None:
        self._section = section

    def __len__(self) -> int:
        return self._section.size

    def row(self, row: int, epoch: int = 0) -> Problem:
        section = self._section
        if not 0 <= row < section.size:
            raise IndexError(f"{section.url}: episode {row} of {section.size}")
        reset = {**section.reset, section.numbered_by: section.first + row}
        return Problem(messages=[NOTHING_ASKED], data_source="openenv", extra={"reset": reset})


def open_resets(
    section: OpenEnvSection, _folder: Path, _split: str | None, _seed: int
) -> NumberedResets:
    return NumberedResets(section)
