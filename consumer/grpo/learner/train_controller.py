"""A train step in one call, `fit`, or in the calls that it makes (XTuner's `TrainController`).

    batch = controller.pack_pad_dispatch(groups)
    batch = controller.compute_old_logprobs(batch)
    batch = controller.compute_ref_logprobs(batch)
    batch = controller.compute_values(batch)
    batch = controller.compute_advantages(batch)
    metrics = controller.train(batch)

A call that the config does not need (values without a critic) returns the batch unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import ConfigError
from buffer.wire.group import RolloutGroup
from consumer.config.learner import AdvantageEstimator
from consumer.config.training import TrainingConfig
from consumer.grpo.learner.advantages import session_advantages, shaped_scores
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.critic import Critic, packed_gae
from consumer.grpo.learner.learner import Learner
from consumer.grpo.model_state.optimizers import mean_metrics
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.policy.micro_batch import TrainBatch
from consumer.handle.ranks import Ranks


class TrainController:
    """Trains a `Learner` on groups, by an advantage estimator or by a critic.

    `advantages`: the estimator, or "gae" (generalized advantage estimation), which needs a
    `critic`. `overlong_buffer_tokens`: see `advantages.py`. Raises ConfigError where these do not
    fit together.
    """

    def __init__(
        self,
        learner: Learner,
        advantages: AdvantageEstimator | Literal["gae"] = "grpo",
        *,
        overlong_buffer_tokens: int | None = None,
        critic: Critic | None = None,
        batch_filter: BatchFilter | None = None,
    ) -> None:
        if (advantages == "gae") != (critic is not None):
            raise ConfigError(
                "advantages = gae needs a critic, and no other estimator uses one",
                hint="set [critic], or another [trainer] advantages",
            )
        self.learner = learner
        self.critic = critic
        self._estimator = advantages
        self._overlong_buffer_tokens = overlong_buffer_tokens
        self._filter = batch_filter or BatchFilter(recorded=learner.recorded)
        # Advantages of the newest batch, per rollout; with a critic per token, before scaling.
        self.advantages: NDArray[np.float32] = np.zeros(0, np.float32)

    @classmethod
    def of(cls, config: TrainingConfig, learner: Learner, model_dir: Path) -> TrainController:
        """Create the controller of [trainer] and [critic]; a critic starts from `model_dir`."""
        section = config.trainer
        critic = None
        if section.is_gae:
            critic = Critic(
                model_dir,
                config.critic,
                device=str(learner.device),
                seed=config.run.seed,
                optimizer=learner.config.optimizer,
                bf16=learner.bf16,
                gradient_checkpointing=learner.config.gradient_checkpointing,
                ranks=learner.ranks,
                sharding=config.learner.sharding,
            )
        batch_filter = BatchFilter(
            section.max_sequence_tokens,
            mask_truncated=section.mask_truncated,
            recorded=learner.recorded,
        )
        return cls(
            learner,
            section.advantages,
            overlong_buffer_tokens=section.overlong_buffer_tokens,
            critic=critic,
            batch_filter=batch_filter,
        )

    def fit(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Train on a batch without what `BatchFilter` excludes; return the metrics of both."""
        filtered = self._filter.apply(groups)
        batch = self.pack_pad_dispatch(filtered.groups)
        batch = self.compute_old_logprobs(batch)
        batch = self.compute_ref_logprobs(batch)
        batch = self.compute_values(batch)
        batch = self.compute_advantages(batch)
        return self.train(batch) | filtered.metrics()

    def pack_pad_dispatch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        """Pack this rank's groups, without the rollouts that have no policy gradient."""
        keep = None if self.critic else self.learner.keep(self.outcome_advantages(groups))
        return self.learner.pack(groups, keep=keep)

    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Compute the logprobs under the weights before the batch, if the loss reads them."""
        return self.learner.compute_old_logprobs(batch)

    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        return self.learner.compute_ref_logprobs(batch)

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        if self.critic:
            for update in batch.updates:
                update.values = [self.critic.values(part) for part in update.batches]
        return batch

    def compute_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Compute advantages by the estimator, or by GAE (scaled to mean 0, std 1)."""
        groups = batch.groups
        if self.critic is None:
            self.advantages = self.outcome_advantages(groups)
            batch.set_advantages(self.advantages)
            return batch
        config = self.critic.config
        scores = np.concatenate([np.zeros(0, np.float32), *map(self._scores, groups)])
        rewards = torch.from_numpy(scores)
        for update in batch.updates:
            pairs = [
                packed_gae(
                    rewards[part.rollout].to(values),
                    values,
                    part,
                    gamma=config.gamma,
                    lam=config.lam,
                )
                for part, values in zip(update.batches, update.values, strict=True)
            ]
            update.advantages = [advantages for advantages, _ in pairs]
            update.returns = [returns for _, returns in pairs]
        self.advantages = _standardize(batch, self.learner.ranks)
        return batch

    def train(self, batch: TrainBatch) -> dict[str, float]:
        metrics = self.learner.train(batch)
        if self.critic is None or not batch.updates:
            return metrics
        losses = [
            self.critic.update(update.batches, update.values, update.returns)
            for update in batch.updates
        ]
        return metrics | mean_metrics(losses, "critic")

    def outcome_advantages(self, groups: Sequence[RolloutGroup]) -> NDArray[np.float32]:
        """Return one advantage per rollout of this rank, float32[sum k]; all ranks must call it."""
        own = [[self._scores(g).tolist(), g.lengths.tolist(), g.sessions] for g in groups]
        ranks = self.learner.ranks.gather(own)
        everywhere = [group for rank in ranks for group in rank]
        estimator = "grpo" if self._estimator == "gae" else self._estimator
        advantages = session_advantages(
            estimator,
            scores=[np.array(scores, np.float32) for scores, _, _ in everywhere],
            lengths=[np.array(lengths, np.int32) for _, lengths, _ in everywhere],
            sessions=[sessions for _, _, sessions in everywhere],
        )
        before = ranks[: self.learner.ranks.rank]
        first = sum(len(scores) for rank in before for scores, _, _ in rank)
        return advantages[first : first + sum(len(group) for group in groups)]

    def state_tensors(self) -> dict[str, Tensor]:
        critic = self.critic.state_tensors() if self.critic else {}
        return self.learner.state_tensors() | critic

    def shard_rows(self) -> dict[str, Rows]:
        critic = self.critic.shard_rows() if self.critic else {}
        return self.learner.shard_rows() | critic

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        if self.critic:
            self.critic.load_state_tensors(state)
        # last: both set the generators of random numbers, and those of the learner count
        self.learner.load_state_tensors(state)

    def _scores(self, group: RolloutGroup) -> NDArray[np.float32]:
        return shaped_scores(group, self._overlong_buffer_tokens)


def _standardize(batch: TrainBatch, ranks: Ranks) -> NDArray[np.float32]:
    """Scale the advantages to mean 0 and standard deviation 1 over the trained tokens of all ranks.

    Returns the advantages of this rank's trained tokens before scaling.
    """
    trained = [
        advantages[part.mask > 0]
        for update in batch.updates
        for advantages, part in zip(update.advantages, update.batches, strict=True)
    ]
    column = torch.cat(trained) if trained else torch.zeros(0)
    count, total = ranks.sum([len(column), float(column.double().sum())])
    if count > 1:
        mean = total / count
        [squares] = ranks.sum([float((column.double() - mean).square().sum())])
        std = math.sqrt(squares / (count - 1))
        for update in batch.updates:
            update.advantages = [(values - mean) / (std + 1e-8) for values in update.advantages]
    return column.cpu().numpy()
