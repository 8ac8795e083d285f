"""A batch on its way through a train step: packed, with the columns that were computed so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.rollouts.group import RolloutGroup
from consumer.grpo.policy.micro_batch import MicroBatches


@dataclass(slots=True)
class Update:
    """Hold the rollouts of one optimizer step that are on this rank.

    `tokens` and `samples` are the divisors of the loss, summed over all ranks; `gids` are the
    groups of this rank. The other columns are lists with one float32[N] for each micro-batch; a
    list is empty until it is computed.
    """

    batches: MicroBatches
    tokens: float
    samples: int
    gids: Sequence[str]
    old_logprobs: list[Tensor] = field(default_factory=list)
    ref_logprobs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    returns: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Hold this rank's groups of a batch, divided into the optimizer steps that consume them."""

    groups: Sequence[RolloutGroup]
    updates: list[Update]

    def set_advantages(self, advantages: NDArray[np.float32]) -> None:
        """Give every token the advantage of its rollout.

        `advantages`: float32[sum k], one for each rollout, in the order of groups and rollouts.
        """
        column = torch.from_numpy(np.asarray(advantages, np.float32))
        for update in self.updates:
            update.advantages = update.batches.per_token(column)
