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
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from buffer.control.length_counts import FINISHED
from buffer.errors import ConfigError
from buffer.imports import is_dotted_path
from buffer.wire.group import RolloutGroup
from consumer.config.learner import LearnerConfig
from consumer.config.trainer import TrainingConfig
from consumer.grpo.learner.advantages import (
    EPS,
    OVER_BATCH,
    Estimator,
    estimate,
    load_estimator,
    per_token,
)
from consumer.grpo.learner.batch_filter import BatchFilter, Filtered
from consumer.grpo.learner.critic import Critic, gae_advantages
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.grpo.learner.learner import Learner
from consumer.grpo.model_state.optimizers import mean_metrics
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.policy.micro_batch import TrainBatch
from consumer.handle.ranks import Ranks

COMPUTED = {"otb": "energy", "gae": "values"}
"""Advantages that need a forward pass, and the token column that it computes for them."""


class TrainController:
    """Trains a `Learner` on groups, by an advantage estimator or by a critic.

    `advantages`: as in [trainer]; "gae" (generalized advantage estimation) needs a `critic`.
    `overlong_buffer_tokens`, `reward_weights`: see `advantages.py`. Raises ConfigError where these
    do not fit together.
    """

    def __init__(
        self,
        learner: Learner,
        advantages: str = "grpo",
        *,
        overlong_buffer_tokens: int | None = None,
        reward_weights: Mapping[str, float] | None = None,
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
        self._name = advantages
        if critic:
            config = critic.config
            self._estimator: Estimator = partial(gae_advantages, gamma=config.gamma, lam=config.lam)
        else:
            self._estimator = load_estimator(advantages, reward_weights)
        self._overlong_buffer_tokens = overlong_buffer_tokens
        self._filter = batch_filter or BatchFilter(recorded=learner.recorded, masks=learner.masks)
        # Of the newest batch, as computed: per rollout, or per trained token (by GAE, unscaled).
        self.advantages: NDArray[np.float32] = np.zeros(0, np.float32)
        # Of each rollout of the newest batch: what kept it from a gradient, or FINISHED.
        self.fates: list[str] = []

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
                updates_per_batch=config.learner.updates_per_batch,
            )
        batch_filter = BatchFilter(
            section.max_sequence_tokens,
            mask_truncated=section.mask_truncated,
            recorded=learner.recorded,
            masks=learner.masks,
            read_columns=read_columns(section.advantages, config.learner),
            needs_rewards=section.advantages != "none",
        )
        return cls(
            learner,
            section.advantages,
            overlong_buffer_tokens=section.overlong_buffer_tokens,
            reward_weights=section.reward_weights,
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
        self.fates = self._fates(groups, filtered, batch)
        return self.train(batch) | filtered.metrics()

    def _fates(
        self, groups: Sequence[RolloutGroup], filtered: Filtered, batch: TrainBatch
    ) -> list[str]:
        """Return for each rollout why it has no gradient, or FINISHED; "" for untrained roles.

        Beside the reasons of the filter: `stale` if all its tokens are too old, `no_advantage` if
        its score is as good as the others.
        """
        advantages = batch.outcome
        kept = None if advantages is None else self._with_gradient(filtered.groups, advantages)
        has_gradient = iter(() if kept is None else kept.tolist())
        reasons, included = iter(filtered.reasons), {id(group) for group in filtered.groups}
        fates: list[str] = []
        for group in groups:
            own = [*islice(reasons, len(group))]
            if id(group) in included:
                rollout = np.repeat(np.arange(len(group)), group.lengths)
                is_trained = np.bincount(rollout, group.mask, len(group)) > 0
                for n, reason in enumerate(own):
                    advantage = FINISHED if next(has_gradient, True) else "no_advantage"
                    found = reason or (advantage if is_trained[n] else "stale")
                    own[n] = found if group.in_training[n] else ""
            fates += own
        return fates

    def pack_pad_dispatch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        """Pack this rank's groups, without the rollouts that have no policy gradient.

        Where advantages need a forward pass, pack what was sampled, though masked since: it counts
        in the comparison.
        """
        if self._name in COMPUTED:
            kept = [np.zeros(0, np.bool_), *map(self._filter.computable, groups)]
            return self.learner.pack(groups, keep=np.concatenate(kept))
        advantages = self.outcome_advantages(groups)
        keep = self._with_gradient(groups, advantages)
        return replace(self.learner.pack(groups, keep=keep), outcome=advantages)

    def _with_gradient(
        self, groups: Sequence[RolloutGroup], advantages: Sequence[NDArray[np.float32]]
    ) -> NDArray[np.bool_] | None:
        """Return which rollouts have a gradient, bool[sum k]; None: all."""
        largest = [
            _largest(per_token(own, group.lengths) * group.mask, group.lengths)
            for own, group in zip(advantages, groups, strict=True)
        ]
        return self.learner.keep(np.concatenate([np.zeros(0, np.float32), *largest]))

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
        """Compute advantages by the estimator; those of a critic are scaled to mean 0, std 1."""
        groups = batch.groups
        computed = self._computed(batch)
        found = batch.outcome
        if found is None:
            found = self.outcome_advantages(groups, computed)
        shown = [
            own if len(own) == len(group) else own[group.mask > 0]
            for own, group in zip(found, groups, strict=True)
        ]
        self.advantages = np.concatenate([np.zeros(0, np.float32), *shown])
        if self.critic:
            returns = [own + np.nan_to_num(v) for own, v in zip(found, computed, strict=True)]
            for update in batch.updates:
                update.returns = update.batches.per_token(returns)
            known = [
                (group.sampled_mask > 0) & ~np.isnan(values)
                for group, values in zip(groups, computed, strict=True)
            ]
            found = _standardize(found, known, self.learner.ranks)
        batch.set_advantages(
            [per_token(own, group.lengths) for own, group in zip(found, groups, strict=True)]
        )
        return batch

    def _computed(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Return the column of `COMPUTED`, float32[R] of each group; [] for other advantages."""
        if self._name == "otb":
            return self.learner.compute_energies(batch)
        if self.critic is None:
            return []
        values = [np.full(len(group.mask), np.nan, np.float32) for group in batch.groups]
        for update in batch.updates:
            update.batches.fill(values, update.values)
        return values

    def train(self, batch: TrainBatch) -> dict[str, float]:
        metrics = self.learner.train(batch)
        if self.critic is None or not batch.updates:
            return metrics
        losses = [
            self.critic.update(update.batches, update.values, update.returns)
            for update in batch.updates
        ]
        return metrics | mean_metrics(losses, "critic")

    def outcome_advantages(
        self, groups: Sequence[RolloutGroup], computed: Sequence[NDArray[np.float32]] = ()
    ) -> list[NDArray[np.float32]]:
        """Return the advantages of this rank's groups; all ranks must call it.

        `computed`: the column of `COMPUTED`, for the advantages that need one.
        """
        own = [GroupRewards.of(group, self._overlong_buffer_tokens) for group in groups]
        for group, column in zip(own, computed, strict=False):
            group.tokens[COMPUTED[self._name]] = column
        ranks = self.learner.ranks
        is_of_user = is_dotted_path(self._name)
        if ranks.size == 1 or not (is_of_user or self._name in OVER_BATCH):
            return estimate(self._name, self._estimator, own)
        parts = ranks.gather([group.lists(with_tokens=is_of_user) for group in own])
        everywhere = [GroupRewards.of_lists(lists) for part in parts for lists in part]
        advantages = estimate(self._name, self._estimator, everywhere)
        first = sum(map(len, parts[: ranks.rank]))
        return advantages[first : first + len(groups)]

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


def read_columns(advantages: str, learner: LearnerConfig) -> frozenset[str] | None:
    """Return the optional columns of rollouts that these read; None: all, by the user's code."""
    if ":" in advantages or ":" in learner.loss.objective:
        return None
    read = {
        "token_rewards": advantages in ("gae", "turns", "otb"),
        "teacher_logprobs": learner.distillation is not None,
        f"teacher_logprobs/{learner.loss.kl_reference}": learner.loss.kl_reference is not None,
    }
    return frozenset(name for name, is_read in read.items() if is_read)


def _largest(advantages: NDArray[np.float32], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return an advantage of each rollout, float32[k], that is 0 where all its tokens have 0."""
    rollout = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rollout, np.abs(advantages), len(lengths)).astype(np.float32)


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
