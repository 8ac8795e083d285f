"""The interface of what reads a large column of rollouts for the model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.wire.group import RolloutGroup


class Places(NamedTuple):
    """Where the S rollouts of a micro-batch are."""

    responses: Sequence[NDArray[np.int32]]
    first: NDArray[np.int64]  # int64[S]: first slot
    totals: NDArray[np.int64]  # int64[S]: tokens of prompt and response
    slots: int  # of the micro-batch
    device: torch.device


class ColumnReader(Protocol):
    """Reads the column `name`, by which groups without a usable one are counted.

    `mistake`: error and hint where all groups of a batch are without.
    """

    name: str
    mistake: tuple[str, str]

    def problem(self, group: RolloutGroup) -> str:
        """Return why the column of a group cannot be used; "" if it can."""

    def of_rollouts(self, values: Sequence[Any], places: Places) -> Any:
        """Return what the forward pass needs of these rollouts; None for nothing.

        Raises WireError for a value that cannot be used.
        """
