"""Objectives and advantages of a user, for `[learner.loss] objective`, `[trainer] advantages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consumer.config.learner import LossConfig
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.grpo.learner.losses import Surrogate, TokenColumns


def reinforce(columns: TokenColumns, config: LossConfig) -> Tensor:
    return -columns.advantages * columns.logprobs


def likelihood(columns: TokenColumns, config: LossConfig) -> Tensor:
    return -columns.logprobs


def of_the_batch(columns: TokenColumns, config: LossConfig) -> Tensor:
    return reinforce(columns, config).mean()


def nothing(columns: TokenColumns, config: LossConfig) -> None:
    return None


def counts(columns: TokenColumns, config: LossConfig) -> Surrogate:
    column = torch.ones_like(columns.logprobs, dtype=torch.long)
    return Surrogate(columns.logprobs, column, column)


def by_token(groups: Sequence[GroupRewards]) -> list[Any]:
    return [np.nan_to_num(group.tokens["token_rewards"]) for group in groups]


def best_of(groups: Sequence[GroupRewards]) -> list[Any]:
    return [group.scores - group.scores.max() for group in groups]


def too_few(groups: Sequence[GroupRewards]) -> list[Any]:
    return [group.scores[1:] for group in groups]
