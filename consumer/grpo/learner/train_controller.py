"""A train step in one call, `fit`, or in the calls that it makes (XTuner's `TrainController`).

    batch = controller.pack_pad_dispatch(groups)
    batch = controller.compute_old_logprobs(batch)
    batch = controller.compute_ref_logprobs(batch)
    batch = controller.compute_values(batch)
    batch = controller.compute_advantages(batch)
    metrics = controller.train(batch)

A call that the config does not need (values without a critic) returns the batch unchanged. With
several ranks, the loss divides by the counts of all, so the gradient equals that of one rank with
the whole batch.

Invariant: a controller that loads another's state continues bit for bit as that one would have
(same machine, same number of threads).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import ConfigError, GradientNotFinite
from buffer.imports import is_dotted_path
from buffer.wire.group import RolloutGroup
from consumer.config.learner import LearnerConfig
from consumer.config.trainer import TrainingConfig
from consumer.grpo.learner.advantages import (
    OVER_BATCH,
    Estimator,
    estimate,
    load_estimator,
    per_token,
)
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.critic import Critic
from consumer.grpo.learner.distillation import Distillation, TeacherWeights, of_covered_tokens
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.grpo.learner.losses import (
    Samples,
    TokenColumns,
    derived_metrics,
    load_objective,
    policy_loss,
    token_weights,
)
from consumer.grpo.model_state.learner_state import TrainedModel
from consumer.grpo.model_state.optimizers import (
    gradient_step,
    mean_metrics,
    scheduled_rate,
    set_rate,
)
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.model_state.sharding import average_gradients, set_gradient_sync
from consumer.grpo.policy.micro_batch import TrainBatch, Update
from consumer.grpo.policy.policy import Policy
from consumer.handle.batch import BatchTable

log = logging.getLogger("rolloutmq.trainer")

COMPUTED = {"otb": "energy", "gae": "values"}
"""Advantages that need a forward pass, and the token column that it computes for them."""


class TrainController:
    """Trains a `policy` on groups, by an advantage estimator or by a critic.

    `advantages`: as in [trainer]; "gae" (generalized advantage estimation) needs a `critic`.
    `overlong_buffer_tokens`, `reward_weights`: see `advantages.py`. `teacher_weights`: see
    `distillation.py`. Raises ConfigError where these do not fit together.
    """

    def __init__(
        self,
        policy: Policy,
        advantages: str = "grpo",
        *,
        overlong_buffer_tokens: int | None = None,
        reward_weights: Mapping[str, float] | None = None,
        teacher_weights: TeacherWeights | None = None,
        critic: Critic | None = None,
        batch_filter: BatchFilter | None = None,
    ) -> None:
        if (advantages == "gae") != (critic is not None):
            raise ConfigError(
                "advantages = gae needs a critic, and no other estimator uses one",
                hint="set [critic], or another [trainer] advantages",
            )
        self.policy = policy
        self.critic = critic
        # in this order: loading one sets the generators of random numbers, and the policy's count
        self.models: list[TrainedModel] = [critic, policy] if critic else [policy]
        self.skipped_in_a_row = 0  # steps whose gradient was not finite
        self._config = policy.config
        self._ranks = policy.ranks
        self._name = advantages
        self._estimator: Estimator = (
            critic.advantages if critic else load_estimator(advantages, reward_weights)
        )
        self._overlong_buffer_tokens = overlong_buffer_tokens
        section = self._config.distillation
        self._distillation = (
            Distillation(section, teacher_weights or {}, self._config.loss) if section else None
        )
        # before hours of rollouts, where it does not exist
        load_objective(self._config.loss.objective)
        self._filter = batch_filter or BatchFilter(readers=policy.readers)
        # Of the newest batch, as computed: per rollout, or per trained token (by GAE, unscaled).
        self.advantages: NDArray[np.float32] = np.zeros(0, np.float32)
        self._trained: TrainBatch | None = None  # the newest batch, for `take_scores`
        # Of each rollout of the newest batch: what kept it from a gradient, or FINISHED.
        self.fates: list[str] = []

    @classmethod
    def of(cls, config: TrainingConfig, policy: Policy, model_dir: Path) -> TrainController:
        """Create the controller of [trainer] and [critic]; a critic starts from `model_dir`."""
        section = config.trainer
        critic = None
        if section.is_gae:
            critic = Critic(model_dir, config.critic, policy, seed=config.run.seed)
        batch_filter = BatchFilter(
            section.max_sequence_tokens,
            mask_truncated=section.mask_truncated,
            readers=policy.readers,
            read_columns=read_columns(section.advantages, config.learner),
            needs_rewards=section.advantages != "none",
        )
        return cls(
            policy,
            section.advantages,
            overlong_buffer_tokens=section.overlong_buffer_tokens,
            reward_weights=section.reward_weights,
            teacher_weights=config.column_weights,
            critic=critic,
            batch_filter=batch_filter,
        )

    def fit(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Train on a batch without what `BatchFilter` excludes; return the metrics of both."""
        self._trained = None
        filtered = self._filter.apply(groups)
        batch = self.pack_pad_dispatch(filtered.groups)
        batch = self.compute_old_logprobs(batch)
        batch = self.compute_ref_logprobs(batch)
        batch = self.compute_values(batch)
        batch = self.compute_advantages(batch)
        outcome = batch.outcome
        has_gradient = None if outcome is None else self._with_gradient(filtered.groups, outcome)
        self.fates = filtered.fates(groups, has_gradient)
        metrics = self.train(batch) | filtered.metrics()
        self._trained = batch
        return metrics

    def take_scores(self, gids: Collection[str]) -> dict[str, dict[str, NDArray[np.float32]]]:
        """Return `TrainBatch.scores` of groups of the newest batch, which is then let go."""
        batch, self._trained = self._trained, None
        return batch.scores(gids) if batch else {}

    def pack_pad_dispatch(self, groups: Sequence[RolloutGroup]) -> TrainBatch:
        """Pack this rank's groups, without the rollouts that have no policy gradient.

        Where advantages need a forward pass, pack what was sampled, though masked since: it counts
        in the comparison.
        """
        if self._name in COMPUTED:
            kept = [np.zeros(0, np.bool_), *map(self._filter.computable, groups)]
            return self.pack(groups, keep=np.concatenate(kept))
        advantages = self.outcome_advantages(groups)
        keep = self._with_gradient(groups, advantages)
        return replace(self.pack(groups, keep=keep), outcome=advantages)

    def _with_gradient(
        self, groups: Sequence[RolloutGroup], advantages: Sequence[NDArray[np.float32]]
    ) -> NDArray[np.bool_] | None:
        """Return which rollouts have a gradient, bool[sum k]; None: all."""
        largest = [np.zeros(0, np.float32)]
        for own, group in zip(advantages, groups, strict=True):
            sizes = np.abs(per_token(own, group.lengths) * group.mask)
            largest.append(group.sums(sizes).astype(np.float32))
        return self.keep(np.concatenate(largest))

    def keep(self, advantages: NDArray[np.float32]) -> NDArray[np.bool_] | None:
        """Return which rollouts need a forward pass, bool[sum k]; None: all of them.

        By an objective of ours, a rollout with advantage 0 has no policy gradient; it still counts
        in the loss's divisors.
        """
        loss = self._config.loss
        has_other = loss.kl_coef or loss.entropy_coef or self._distillation
        return None if has_other or is_dotted_path(loss.objective) else advantages != 0

    def pack(
        self, groups: Sequence[RolloutGroup], *, keep: NDArray[np.bool_] | None = None
    ) -> TrainBatch:
        """Pack this rank's groups into micro-batches, divided into `updates_per_batch` updates.

        `keep`: bool[sum k], which rollouts to pack; default: all that have a trained token. All
        ranks get equal numbers of updates and of micro-batches in each. Raises as
        `Packer.pack_pad_dispatch`.
        """
        table = BatchTable.of(groups)
        kept = table.trained > 0 if keep is None else keep
        counted = np.concatenate([np.zeros(0, np.bool_), *(g.in_training for g in groups)])
        updates = []
        for chosen in np.array_split(np.arange(len(groups)), self._config.updates_per_batch):
            # with several ranks, all take part in every update, also one without groups
            if not len(chosen) and self._ranks.size == 1:
                continue
            part = np.isin(table.group, chosen)
            batches = self.policy.packer.pack_pad_dispatch(table, keep=kept & part)
            batches.pad(self._ranks.max(len(batches)))
            own = [int(table.trained[part].sum()), int((part & counted).sum())]
            tokens, samples = self._ranks.sum(own)
            gids = [groups[n].gid for n in np.unique(table.group[part]).tolist()]
            updates.append(Update(batches, tokens, int(samples), gids))
        return TrainBatch(groups, updates)

    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Compute the log-probabilities under the weights before this batch.

        Leaves the batch as it is unless the ratio is to them and there are several updates.
        """
        if self._needs_old_logprobs:
            for update in batch.updates:
                update.old_logprobs = [self.policy.logprobs(part) for part in update.batches]
        return batch

    @property
    def _needs_old_logprobs(self) -> bool:
        return self._config.updates_per_batch > 1 and not self._config.is_against_rollout

    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Compute the logprobs under the reference of the KL, unless `kl_coef` is 0."""
        policy, teacher = self.policy, self._config.loss.kl_reference
        for update in batch.updates:
            if policy.reference:
                update.ref_logprobs = [policy.reference_logprobs(part) for part in update.batches]
            elif teacher:
                update.ref_logprobs = update.batches.column(f"teacher_logprobs/{teacher}")
        return batch

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        if self.critic:
            self.critic.compute_values(batch)
        return batch

    def compute_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Compute advantages by the estimator; those of a critic are scaled to mean 0, std 1."""
        groups = batch.groups
        computed: list[NDArray[np.float32]] = []
        if self.critic:
            computed = self.critic.values(batch)
        elif self._name == "otb":
            computed = self.compute_energies(batch)
        found = batch.outcome
        if found is None:
            found = self.outcome_advantages(groups, computed)
        shown = [
            own if len(own) == len(group) else own[group.mask > 0]
            for own, group in zip(found, groups, strict=True)
        ]
        self.advantages = np.concatenate([np.zeros(0, np.float32), *shown])
        if self.critic:
            found = self.critic.set_returns(batch, found, computed)
        batch.set_advantages(
            [per_token(own, group.lengths) for own, group in zip(found, groups, strict=True)]
        )
        return batch

    def compute_energies(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Return `Policy.energies`, float32[R] of each group; 0 where a token was not sampled."""
        energies = [np.zeros(len(group.mask), np.float32) for group in batch.groups]
        for update in batch.updates:
            update.batches.fill(energies, [self.policy.energies(part) for part in update.batches])
        return [own * g.sampled_mask for own, g in zip(energies, batch.groups, strict=True)]

    def outcome_advantages(
        self, groups: Sequence[RolloutGroup], computed: Sequence[NDArray[np.float32]] = ()
    ) -> list[NDArray[np.float32]]:
        """Return the advantages of this rank's groups; all ranks must call it.

        `computed`: the column of `COMPUTED`, for the advantages that need one.
        """
        own = [GroupRewards.of(group, self._overlong_buffer_tokens) for group in groups]
        for group, column in zip(own, computed, strict=False):
            group.tokens[COMPUTED[self._name]] = column
        ranks = self._ranks
        is_of_user = is_dotted_path(self._name)
        if ranks.size == 1 or not (is_of_user or self._name in OVER_BATCH):
            return estimate(self._name, self._estimator, own)
        parts = ranks.gather([group.lists(with_tokens=is_of_user) for group in own])
        everywhere = [GroupRewards.of_lists(lists) for part in parts for lists in part]
        advantages = estimate(self._name, self._estimator, everywhere)
        first = sum(map(len, parts[: ranks.rank]))
        return advantages[first : first + len(groups)]

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Take the optimizer steps of a batch whose advantages are set; return the metrics.

        Metrics are means over trained tokens; `optim/*` and `loss/policy` over optimizer steps. A
        step whose gradient is not finite is skipped and counts in `optim/skipped_updates`. Raises
        ConfigError where the loss lacks log-probabilities, GradientNotFinite after
        `max_skipped_updates` such steps in a row.
        """
        needed = {
            "old_logprobs": self._needs_old_logprobs,
            "ref_logprobs": self._config.loss.kl_coef > 0,
        }
        for name, is_needed in needed.items():
            if is_needed and any(
                len(getattr(update, name)) < len(update.batches) for update in batch.updates
            ):
                raise ConfigError(f"the batch has no {name}", hint=f"call compute_{name} first")
        metrics = mean_metrics([self._update(update) for update in batch.updates], "optim")
        if self.critic and batch.updates:
            metrics |= self.critic.train(batch)
        return metrics

    def _update(self, update: Update) -> dict[str, float] | None:
        """Take one optimizer step and return its metrics; None where it was skipped."""
        sums: Counter[str] = Counter()
        self.policy.optimizer.zero_grad(set_to_none=True)
        for index in range(len(update.batches)):
            sums.update(self._backward(update, index))
        sums = Counter(dict(zip(sums, self._ranks.sum(list(sums.values())), strict=True)))
        optim = self._optimize(update)
        if optim is None:
            return None
        metrics = {"loss/policy": sums.pop("loss/policy", 0.0)}
        computed = sums.pop("tokens", 0.0)
        means = {name: value / max(1.0, computed) for name, value in sums.items()}
        metrics |= derived_metrics(of_covered_tokens(means))
        metrics["batch/trained_share"] = computed / max(1.0, update.tokens)
        return metrics | optim

    def _backward(self, update: Update, index: int) -> dict[str, float]:
        """Add the gradient of a micro-batch; return its metrics, summed over trained tokens."""
        config, loss_config = self._config, self._config.loss
        batch = update.batches[index]
        current = self.policy.score(batch, entropy_gradient=loss_config.entropy_coef > 0)
        update.logprobs.append(current.logprobs.detach())
        update.entropy.append(current.entropy.detach())
        samples = Samples(batch.mask, batch.sample, batch.trained_tokens)
        old_logprobs = current.logprobs.detach()
        if config.is_against_rollout:
            old_logprobs = batch.rollout_logprobs
        elif update.old_logprobs:
            old_logprobs = update.old_logprobs[index]
        columns = TokenColumns(
            logprobs=current.logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=update.advantages[index],
            samples=samples,
            entropy=current.entropy,
            ref_logprobs=update.ref_logprobs[index] if update.ref_logprobs else None,
            optional=batch.optional,
            old_is_rollout=config.is_against_rollout,
        )
        if self._distillation:
            columns = self._distillation.apply(columns, batch, current.others)
        weights = token_weights(
            samples, loss_config, batch_tokens=update.tokens, batch_samples=update.samples
        )
        loss, metrics = policy_loss(columns, weights, loss_config)
        is_last = index == len(update.batches) - 1
        set_gradient_sync(self.policy.logits, is_last=is_last, config=config.sharding)
        # gradients are averaged over ranks, and the loss is a sum over them
        torch.autograd.backward(loss * self._ranks.size)
        # one transfer from the device for all of them
        values = torch.stack([loss.detach(), batch.mask.sum(), *metrics.values()]).tolist()
        return dict(zip(["loss/policy", "tokens", *metrics], values, strict=True))

    def _optimize(self, update: Update) -> dict[str, float] | None:
        """Take the step along the gradient; None: it is not finite, and no weight was changed."""
        policy = self.policy
        rate = scheduled_rate(self._config, policy.step)
        policy.step += 1
        if not update.batches:
            # no gradient: a step would still move the weights by the decaying moments
            return {"optim/grad_norm": 0.0, "optim/learning_rate": rate}
        set_rate(policy.optimizer, rate)
        average_gradients(policy.parameters.values(), self._ranks)
        norm = gradient_step(policy.optimizer, self._config.max_grad_norm)
        if norm is not None:
            self.skipped_in_a_row = 0
            scale = min(1.0, self._config.max_grad_norm / max(norm, 1e-30))
            return {"optim/grad_norm": norm, "optim/clip_scale": scale, "optim/learning_rate": rate}
        self.skipped_in_a_row += 1
        log.error(
            f"the gradient of optimizer step {policy.step} is not finite: no weight was changed. "
            f"Its groups: {', '.join(update.gids)}"
        )
        if self.skipped_in_a_row >= self._config.max_skipped_updates:
            raise GradientNotFinite(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped: their gradients "
                f"are not finite. Groups of the last one: {', '.join(update.gids[:3])}",
                hint="does the loss overflow (objective, advantages)? Else lower [learner] "
                "learning_rate, and restart from an older checkpoint; or raise max_skipped_updates",
            )
        return None

    def sleep(self) -> None:
        """Free the device; see `TrainedModel.sleep`."""
        for model in self.models:
            model.sleep()

    def wake(self) -> None:
        for model in self.models:
            model.wake()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return what a resume of this rank needs, on the CPU (see `learner_state.py`)."""
        state = {"skipped": torch.tensor(self.skipped_in_a_row)}
        for model in self.models:
            state |= model.state_tensors()
        return state

    def shard_rows(self) -> dict[str, Rows]:
        return {name: rows for model in self.models for name, rows in model.shard_rows().items()}

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors()`. Raises ModelError for another's."""
        for model in self.models:
            model.load_state_tensors(state)
        self.skipped_in_a_row = int(state["skipped"])


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
