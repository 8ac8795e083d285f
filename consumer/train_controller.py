"""A train step in one call, or in the steps it consists of (XTuner's `TrainController`).

    controller.fit(groups)                                    # the same, of usable groups, as
    batch = controller.pack_pad_dispatch(groups)
    batch = controller.compute_old_logprobs(batch)
    batch = controller.compute_ref_logprobs(batch)
    batch = controller.compute_values(batch)
    batch = controller.compute_advantages(batch)
    metrics = controller.train(batch)

A step that the config does not ask for (a reference without a KL term, values without a critic) leaves the batch as it
is. What is between two of them is yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import ConfigError
from buffer.group import RolloutGroup
from consumer.advantages import AdvantageEstimator, session_advantages
from consumer.batch_filter import BatchFilter
from consumer.config import TrainingConfig
from consumer.critic import Critic, packed_gae
from consumer.learner import Learner
from consumer.overlong import shaped_scores
from consumer.train_batch import TrainBatch


class TrainController:
    """Trains a `Learner` on groups; with a critic, advantages are generalized ones, token by token."""

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
            raise ConfigError("advantages = gae needs a critic, and only it has one", hint="see [critic] of the config")
        if critic and learner.ranks.size > 1:
            raise ConfigError("a critic trains on one rank only", hint="an estimator that compares rollouts needs none")
        self.learner, self.critic = learner, critic
        self._estimator, self._overlong = advantages, overlong_buffer_tokens
        self._filter = batch_filter or BatchFilter(recorded=learner.recorded)
        self.advantages: NDArray[np.float32] = np.zeros(0, np.float32)
        """of the newest batch: one per rollout; with a critic one per token, before they are scaled"""

    @classmethod
    def of(cls, config: TrainingConfig, learner: Learner, model_dir: Path) -> TrainController:
        """As [trainer] and [critic] say; a critic starts from the model of that folder."""
        section, seed, device = config.trainer, config.run.seed, learner.device.type
        critic = Critic(model_dir, config.critic, device=device, seed=seed) if section.is_gae else None
        usable = BatchFilter(
            section.max_sequence_tokens, mask_truncated=section.mask_truncated, recorded=learner.recorded
        )
        overlong = section.overlong_buffer_tokens
        return cls(learner, section.advantages, overlong_buffer_tokens=overlong, critic=critic, batch_filter=usable)

    def fit(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Train on one batch, without what `BatchFilter` leaves out; metrics as of `Learner.train_step`."""
        usable = self._filter.apply(groups)
        return self._fit(usable.groups) | usable.metrics()

    def _fit(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        if self.critic is None:
            self.advantages = self.outcome_advantages(groups)
            return self.learner.train_step(groups, self.advantages)
        batch = self.pack_pad_dispatch(groups)
        if self.learner.config.old_policy == "current":
            batch = self.compute_old_logprobs(batch)
        batch = self.compute_values(self.compute_ref_logprobs(batch))
        return self.train(self.compute_advantages(batch))

    def pack_pad_dispatch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        """Micro-batches by token budget, cut into optimizer steps. Rollouts that teach nothing are left out."""
        keep = None if self.critic else self.learner.keep(self.outcome_advantages(groups))
        return self.learner.pack(groups, keep=keep)

    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Of the present weights; read where `learner.old_policy` is current."""
        return self.learner.compute_old_logprobs(batch)

    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        return self.learner.compute_ref_logprobs(batch)

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        for update in batch.updates if self.critic else []:
            assert self.critic
            update.values = [self.critic.values(part) for part in update.batches]
        return batch

    def compute_advantages(self, batch: TrainBatch) -> TrainBatch:
        """By the estimator; with values, by GAE, then scaled to mean 0 and deviation 1 over the batch's tokens."""
        groups: Sequence[RolloutGroup] = batch.groups  # type: ignore[assignment]
        if self.critic is None:
            self.advantages = self.outcome_advantages(groups)
            batch.set_advantages(self.advantages)
            return batch
        scores = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *map(self._scores, groups)]))
        config = self.critic.config
        for update in batch.updates:
            pairs = [
                packed_gae(scores[part.rollout].to(values), values, part, gamma=config.gamma, lam=config.lam)
                for part, values in zip(update.batches, update.values, strict=True)
            ]
            update.advantages, update.returns = [a for a, _ in pairs], [r for _, r in pairs]
        self.advantages = _standardize(batch)
        return batch

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """The optimizer steps of policy and critic."""
        metrics = self.learner.train(batch)
        if self.critic is None:
            return metrics
        told = [self.critic.update(u.batches, u.values, u.returns) for u in batch.updates]
        return metrics | {name: sum(t[name] for t in told) / len(told) for name in (told[0] if told else ())}

    def outcome_advantages(self, groups: Sequence[RolloutGroup]) -> NDArray[np.float32]:
        """One per rollout of this rank, float32[sum k]. Estimators that look at the whole batch see all ranks'."""
        said = self.learner.ranks.say([[self._scores(g).tolist(), g.lengths.tolist(), g.sessions] for g in groups])
        everywhere = [group for rank in said for group in rank]
        scores = [np.array(group[0], np.float32) for group in everywhere]
        lengths = [np.array(group[1], np.int32) for group in everywhere]
        first = sum(len(group[0]) for rank in said[: self.learner.ranks.rank] for group in rank)
        estimator = "grpo" if self._estimator == "gae" else self._estimator
        sessions = [group[2] for group in everywhere]
        advantages = session_advantages(estimator, scores, lengths, sessions)
        return advantages[first : first + sum(len(group) for group in groups)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs, of learner and critic."""
        critic = self.critic.state_tensors() if self.critic else {}
        return self.learner.state_tensors() | {f"critic/{name}": tensor for name, tensor in critic.items()}

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        prefix = "critic/"
        if self.critic:
            own = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            self.critic.load_state_tensors(own)
        # last: it is the one whose random state counts
        self.learner.load_state_tensors({name: t for name, t in state.items() if not name.startswith(prefix)})

    def _scores(self, group: RolloutGroup) -> NDArray[np.float32]:
        return shaped_scores(group, self._overlong)


def _standardize(batch: TrainBatch) -> NDArray[np.float32]:
    """Scale to mean 0 and deviation 1 over all trained tokens of the batch; what they were before."""
    parts = [(a, b.mask > 0) for u in batch.updates for a, b in zip(u.advantages, u.batches, strict=True)]
    column = torch.cat([advantages[trained] for advantages, trained in parts]) if parts else torch.zeros(0)
    if len(column) > 1:
        mean, std = column.mean(), column.std()
        for update in batch.updates:
            update.advantages = [(advantages - mean) / (std + 1e-8) for advantages in update.advantages]
    return column.cpu().numpy()
