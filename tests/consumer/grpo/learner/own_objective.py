"""Objectives of a user, for `[learner.loss] objective`."""

from __future__ import annotations

import torch
from torch import Tensor

from consumer.config.learner import LossConfig
from consumer.grpo.learner.losses import Surrogate, TokenColumns


def reinforce(columns: TokenColumns, config: LossConfig) -> Tensor:
    return -columns.advantages * columns.logprobs


def of_the_batch(columns: TokenColumns, config: LossConfig) -> Tensor:
    return reinforce(columns, config).mean()


def nothing(columns: TokenColumns, config: LossConfig) -> None:
    return None


def counts(columns: TokenColumns, config: LossConfig) -> Surrogate:
    column = torch.ones_like(columns.logprobs, dtype=torch.long)
    return Surrogate(columns.logprobs, column, column)
