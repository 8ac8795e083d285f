"""A batch on its way through a train step: packed, and with what was computed of it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.packing import GroupColumns, MicroBatch


@dataclass(slots=True)
class Update:
    """The rollouts of one optimizer step, on this rank.

    `tokens` and `samples` are what the loss divides by, over all ranks. The other columns are lists of float32[N], one
    for each micro-batch; empty where they were not computed.
    """

    batches: list[MicroBatch]
    tokens: float
    samples: int
    old_logprobs: list[Tensor] = field(default_factory=list)
    ref_logprobs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    returns: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The groups of a batch that are this rank's, as the optimizer steps that will consume them."""

    groups: Sequence[GroupColumns]
    updates: list[Update]

    def set_advantages(self, advantages: NDArray[np.float32]) -> None:
        """One per rollout, float32[sum k] in the order of groups and rollouts: each token gets its rollout's."""
        column = torch.from_numpy(np.asarray(advantages, np.float32))
        for update in self.updates:
            update.advantages = [_spread(column, batch) for batch in update.batches]


def _spread(column: Tensor, batch: MicroBatch) -> Tensor:
    return column.to(batch.sample.device)[batch.rollout][batch.sample]
