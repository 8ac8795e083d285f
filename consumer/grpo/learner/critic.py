"""A critic (PPO, Schulman et al. 2017, arXiv:1707.06347): one number per token, no logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from consumer.config.critic import CriticConfig
from consumer.grpo.learner.advantages import EPS
from consumer.grpo.learner.group_rewards import GroupRewards, SessionTokens
from consumer.grpo.model_state.learner_state import TrainedModel
from consumer.grpo.model_state.optimizers import (
    gradient_step,
    make_optimizer,
    mean_metrics,
    set_rate,
)
from consumer.grpo.model_state.sharding import (
    empty_model,
    load_shards,
    place,
    set_gradient_sync,
    shard,
)
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.micro_batch import MicroBatch, TrainBatch, Update
from consumer.grpo.policy.policy import Policy
from consumer.handle.ranks import Ranks

log = logging.getLogger("rolloutmq.trainer")


class ValueModel(nn.Module):
    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.hidden_size, 1, device="cpu")
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_index: Tensor) -> Tensor:
        """Return float32[N]; the arguments are those of `TargetLogits`."""
        hidden = self.body(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        # logit_index: the slot before a token is the state in which it was chosen
        states = hidden.flatten(0, 1).index_select(0, logit_index)
        # the head in float32: returns need more than 8 bits
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.float()).squeeze(1)
        return values


class Critic(TrainedModel):
    """Estimates the value of each token's state, for GAE: the column `values`.

    Starts from `model_dir` with a value head of zeros. Kind of optimizer, precision, gradient
    checkpointing, sharding and `updates_per_batch` are those of `policy`.
    """

    def __init__(
        self, model_dir: Path, config: CriticConfig, policy: Policy, *, seed: int = 0
    ) -> None:
        self.config = config
        own, self._ranks, self._bf16 = policy.config, policy.ranks, policy.bf16
        self._warmup_steps = config.warmup_steps * own.updates_per_batch
        self._sharding = own.sharding
        self.advantages = partial(gae_advantages, gamma=config.gamma, lam=config.lam)
        device = policy.device
        torch.manual_seed(seed)
        if self._ranks.size == 1:
            self.model = ValueModel(load_model(model_dir).base_model).to(device)
        else:
            body = empty_model(model_dir, kind=AutoModel)
            self.model = ValueModel(body)
            self.model.head.to(device)
            shard(self.model, body, device, own.sharding)
            load_shards(body, model_dir)
            place(self.model, device, own.sharding)
        self.model.train()
        if own.gradient_checkpointing:
            self.model.body.gradient_checkpointing_enable({"use_reentrant": False})
        parameters = dict(self.model.named_parameters())
        optimizer = make_optimizer(
            own.optimizer, parameters.values(), rate=config.learning_rate, ranks=self._ranks.size
        )
        super().__init__(parameters, optimizer, device, [self.model], prefix="critic/")

    @torch.no_grad()
    def compute_values(self, batch: TrainBatch) -> None:
        """Compute the expected return before each response token of the batch."""
        for update in batch.updates:
            update.values = [self._forward(part) for part in update.batches]

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Return what `compute_values` has computed, float32[R] of each group; nan: nothing."""
        values = [np.full(len(group.mask), np.nan, np.float32) for group in batch.groups]
        for update in batch.updates:
            update.batches.fill(values, update.values)
        return values

    def set_returns(
        self,
        batch: TrainBatch,
        advantages: Sequence[NDArray[np.float32]],
        values: Sequence[NDArray[np.float32]],
    ) -> list[NDArray[np.float32]]:
        """Set what `train` fits values to; return the advantages, scaled to mean 0 and std 1."""
        returns = [own + np.nan_to_num(v) for own, v in zip(advantages, values, strict=True)]
        for update in batch.updates:
            update.returns = update.batches.per_token(returns)
        known = [
            (group.sampled_mask > 0) & ~np.isnan(own)
            for group, own in zip(batch.groups, values, strict=True)
        ]
        return _standardize(advantages, known, self._ranks)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Take the optimizer steps of a batch towards its returns; return the metrics of all ranks.

        A step whose gradient is not finite is skipped and counts in `critic/skipped_updates`.
        """
        return mean_metrics([self._update(update) for update in batch.updates], "critic")

    def _update(self, update: Update) -> dict[str, float] | None:
        batches = update.batches
        [count] = self._ranks.sum([batches.trained_tokens])
        tokens = max(1.0, count)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        abs_error = 0.0
        for index, batch in enumerate(batches):
            old, returns = update.values[index], update.returns[index]
            values = self._forward(batch)
            loss = value_loss(values, old, returns, batch.mask, self.config.clip) / tokens
            is_last = index == len(batches) - 1
            set_gradient_sync(self.model, is_last=is_last, config=self._sharding)
            # gradients are averaged over ranks, and the loss is a sum over them
            torch.autograd.backward(loss * self._ranks.size)
            total += float(loss.detach())
            abs_error += float(((returns - old) * batch.mask).abs().sum()) / tokens
        total, abs_error = self._ranks.sum([total, abs_error])
        warmup = min(1.0, (self.step + 1) / max(1, self._warmup_steps))
        set_rate(self.optimizer, self.config.learning_rate * warmup)
        norm = gradient_step(self.optimizer, self.config.max_grad_norm)
        self.step += 1
        if norm is None:
            log.error("the gradient of the critic's step %s is not finite: skipped", self.step)
            return None
        return {"critic/loss": total, "critic/abs_error": abs_error, "critic/grad_norm": norm}

    def _forward(self, batch: MicroBatch) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            values: Tensor = self.model(batch.input_ids, batch.position_ids, batch.logit_index)
        return values


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> Tensor:
    """Return half the squared error summed over trained tokens, a scalar from float32[N] each.

    With `clip` c, take the larger of that and the error of `old + clip(values - old, -c, c)` (the
    clipped value loss of PPO's reference code).
    """
    error = (values - returns).square()
    if clip is not None:
        bounded = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return torch.where(mask > 0, error, 0.0).sum() / 2


def gae_advantages(
    groups: Sequence[GroupRewards], *, gamma: float = 1.0, lam: float = 1.0
) -> list[NDArray[np.float32]]:
    """Return generalized advantage estimates, float32[R] per group, from the tokens' `values`.

    (Schulman et al. 2016, arXiv:1506.02438, equation 16.) The score is received at the last sampled
    token of a session, token_rewards where they are. Tokens without a value (nan) are skipped, like
    those that were not sampled: they get 0, and their rewards count for the token before them.
    """
    found = []
    for group in groups:
        column = group.tokens["values"]
        mask = group.tokens["mask"] * ~np.isnan(column)
        tokens = SessionTokens.of(replace(group, tokens=group.tokens | {"mask": mask}))
        value = column[tokens.place].astype(np.float64)
        has_next = tokens.session[:-1] == tokens.session[1:]
        is_last = np.append(~has_next, True)[: len(value)]
        scores = SessionTokens.of(group).outcomes()[group.firsts][tokens.session]
        delta = tokens.rewards + np.where(is_last, scores, 0.0) - value
        delta[:-1] += gamma * np.where(has_next, value[1:], 0.0)
        found.append(tokens.column(_discounted_sums(delta, tokens.session, gamma * lam)))
    return found


def _discounted_sums(
    terms: NDArray[np.float64], session: NDArray[np.intp], discount: float
) -> NDArray[np.float64]:
    """Return `sum_j discount^j terms[i + j]` over the rest of the session of i, for every i.

    `session`: int[T], ascending. Doubles the span: log2(longest session) passes over all tokens.
    """
    sums = terms.copy()
    reach, longest = 1, int(np.bincount(session).max(initial=0))
    while reach < longest:
        sums[:-reach] += np.where(
            session[:-reach] == session[reach:], discount**reach * sums[reach:], 0.0
        )
        reach *= 2
    return sums


def _standardize(
    columns: Sequence[NDArray[np.float32]], known: Sequence[NDArray[np.bool_]], ranks: Ranks
) -> list[NDArray[np.float32]]:
    """Scale columns to mean 0 and standard deviation 1 over the `known` tokens of all ranks."""
    parts = [column[own] for column, own in zip(columns, known, strict=True)]
    joined = np.concatenate([np.zeros(0), *parts])
    count, total = ranks.sum([len(joined), float(joined.sum())])
    if count < 2:
        return [*columns]
    mean = total / count
    [squares] = ranks.sum([float(np.square(joined - mean).sum())])
    std = math.sqrt(squares / (count - 1))
    return [((column - mean) / (std + EPS)).astype(np.float32) for column in columns]
