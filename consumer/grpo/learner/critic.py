"""A critic (PPO, Schulman et al. 2017, arXiv:1707.06347): one number per token, no logits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from consumer.config.learner import CriticConfig, OptimizerKind, ShardingConfig
from consumer.grpo.learner.group_rewards import GroupRewards, SampledTokens
from consumer.grpo.model_state.learner_state import capture, restore, shard_rows
from consumer.grpo.model_state.optimizers import gradient_step, make_optimizer, set_rate
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.model_state.sharding import place, set_gradient_sync, shard
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.models.shards import empty_model, load_shards
from consumer.grpo.policy.micro_batch import MicroBatch, MicroBatches
from consumer.handle.ranks import ALONE, Ranks

PREFIX = "critic/"  # names of a critic's tensors in the state begin with it

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


class Critic:
    """Estimates the value of each token's state; `step` counts optimizer steps.

    Starts from `model_dir` with a value head of zeros. `optimizer`, `bf16`,
    `gradient_checkpointing`, `sharding` and `updates_per_batch` are the policy's ([learner]). All
    ranks call the same methods.
    """

    def __init__(
        self,
        model_dir: Path,
        config: CriticConfig,
        *,
        device: str = "cpu",
        seed: int = 0,
        optimizer: OptimizerKind = "adamw",
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
        sharding: ShardingConfig | None = None,
        updates_per_batch: int = 1,
    ) -> None:
        self.config = config
        self._warmup_steps = config.warmup_steps * updates_per_batch
        self._bf16 = bf16
        self.device = torch.device(device)
        self.step = 0
        self._ranks = ranks
        self._sharding = sharding or ShardingConfig()
        torch.manual_seed(seed)
        self.model = self._load(model_dir).train()
        if gradient_checkpointing:
            self.model.body.gradient_checkpointing_enable({"use_reentrant": False})
        self.parameters = dict(self.model.named_parameters())
        self._optimizer = make_optimizer(
            optimizer, self.parameters.values(), rate=config.learning_rate, ranks=ranks.size
        )

    def _load(self, model_dir: Path) -> ValueModel:
        if self._ranks.size == 1:
            return ValueModel(load_model(model_dir).base_model).to(self.device)
        body = empty_model(model_dir, kind=AutoModel)
        model = ValueModel(body)
        model.head.to(self.device)
        shard(model, body, self.device, self._sharding)
        load_shards(body, model_dir)
        place(model, self.device, self._sharding)
        return model

    def on_device(self) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        return [self.model], self._optimizer

    @torch.no_grad()
    def values(self, batch: MicroBatch) -> Tensor:
        """Return the expected return before each of the N response tokens, float32[N]."""
        return self._forward(batch)

    def update(
        self, batches: MicroBatches, old: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> dict[str, float] | None:
        """Take one optimizer step towards `returns`; return the metrics of all ranks.

        None: skipped, as the gradient is not finite. `old`: values before the step; both are
        float32[N] per micro-batch.
        """
        [count] = self._ranks.sum([batches.trained_tokens])
        tokens = max(1.0, count)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        abs_error = 0.0
        for index, batch in enumerate(batches):
            values = self._forward(batch)
            error = value_loss(values, old[index], returns[index], batch.mask, self.config.clip)
            loss = error / tokens
            is_last = index == len(batches) - 1
            set_gradient_sync(self.model, is_last=is_last, config=self._sharding)
            # gradients are averaged over ranks, and the loss is a sum over them
            torch.autograd.backward(loss * self._ranks.size)
            total += float(loss.detach())
            abs_error += float(((returns[index] - old[index]) * batch.mask).abs().sum()) / tokens
        total, abs_error = self._ranks.sum([total, abs_error])
        warmup = min(1.0, (self.step + 1) / max(1, self._warmup_steps))
        set_rate(self._optimizer, self.config.learning_rate * warmup)
        norm = gradient_step(self._optimizer, self.config.max_grad_norm)
        self.step += 1
        if norm is None:
            log.error("the gradient of the critic's step %s is not finite: skipped", self.step)
            return None
        return {"critic/loss": total, "critic/abs_error": abs_error, "critic/grad_norm": norm}

    def state_tensors(self) -> dict[str, Tensor]:
        return capture(self.parameters, self._optimizer, self.step, self.device, PREFIX)

    def shard_rows(self) -> dict[str, Rows]:
        return shard_rows(self.parameters, PREFIX)

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the result of `state_tensors()`. Raises ModelError for another model's."""
        self.step = restore(state, self.parameters, self._optimizer, self.device, PREFIX)

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
    return [_gae(group, gamma, lam) for group in groups]


def _gae(group: GroupRewards, gamma: float, lam: float) -> NDArray[np.float32]:
    column = group.tokens["values"]
    known = replace(group, tokens=group.tokens | {"mask": group.tokens["mask"] * ~np.isnan(column)})
    tokens = SampledTokens.of(known)
    value = column[tokens.place].astype(np.float64)
    has_next = tokens.session[:-1] == tokens.session[1:]
    is_last = np.append(~has_next, True)[: len(value)]
    scores = SampledTokens.of(group).outcomes()[group.firsts][tokens.session]
    delta = tokens.rewards + np.where(is_last, scores, 0.0) - value
    delta[:-1] += gamma * np.where(has_next, value[1:], 0.0)
    return tokens.column(_discounted_sums(delta, tokens.session, gamma * lam))


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
