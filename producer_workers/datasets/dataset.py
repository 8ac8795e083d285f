"""A data set: numbered problems, each readable on its own.

Random access is the whole interface: a cursor into a data set is one integer (`draw_order.py`), so nothing
of a reader has to be saved or restored. What can only be iterated over is made to look like it (`stream.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from buffer.structured_output import StructuredOutput


class Problem(BaseModel):
    """One row: the chat that asks, the tools it may use, and what a judge needs to score an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: list[dict[str, Any]] = Field(min_length=1)
    ground_truth: Any = None
    data_source: str | None = None
    tools: list[dict[str, Any]] | None = None
    structured: StructuredOutput | None = Field(None, description="of a response; None: as the task says")
    images: list[Path | bytes] = Field([], description="files or bytes, in the order in which the messages show them")
    extra: dict[str, Any] = {}


class Dataset(Protocol):
    """Rows 0 .. len - 1. The same row number gives the same problem for as long as the run lives."""

    def __len__(self) -> int: ...

    def row(self, row: int, epoch: int = 0) -> Problem:
        """Raises DatasetError where the row cannot be used, IndexError where there is none.

        `epoch` only matters to data sets that bring an order of their own for each.
        """
        ...
