"""The learner: a model, its optimizer and the steps that turn rollouts into new weights.

Parameters and optimizer state are float32 (moments of adamw_8bit: 8 bits); with `bf16`, forward
passes run in bfloat16. Several ranks shard both (FSDP2), except a LoRA adapter; the loss divides by
the counts of all ranks, so the gradient equals that of one rank with the whole batch.

Invariant: a learner that loads another's state continues bit for bit as that one would have (same
machine, same number of threads).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import ConfigError, GradientNotFinite
from buffer.imports import is_dotted_path
from buffer.maintenance.column_files import NO_FILES, ColumnFolder
from buffer.weights.safetensors_files import model_checksum
from buffer.wire.group import RolloutGroup
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.distillation import Distillation, TeacherWeights, of_covered_tokens
from consumer.grpo.learner.losses import (
    Samples,
    TokenColumns,
    derived_metrics,
    load_objective,
    policy_loss,
    token_weights,
)
from consumer.grpo.model_state.learner_state import capture, restore, shard_rows
from consumer.grpo.model_state.optimizers import (
    gradient_step,
    make_optimizer,
    mean_metrics,
    scheduled_rate,
    set_rate,
)
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.model_state.sharding import average_gradients, set_gradient_sync
from consumer.grpo.model_state.weights_folder import HostBuffers, WeightsSnapshot, snapshot_weights
from consumer.grpo.models.device_choices import choose_bf16
from consumer.grpo.policy.logprobs import TargetLogits, token_logprobs
from consumer.grpo.policy.lora import Adapter
from consumer.grpo.policy.mask_reader import MaskReader
from consumer.grpo.policy.micro_batch import MicroBatch, Packer, TrainBatch, Update
from consumer.grpo.policy.model_checks import check_logprobs, keeps_samples_apart
from consumer.grpo.policy.policy_loading import load_policy, vocabulary_of
from consumer.grpo.policy.routing_replay import RoutingReplay
from consumer.grpo.policy.vocabulary_projection import TokenLogprobs
from consumer.handle.batch import BatchTable
from consumer.handle.ranks import ALONE, Ranks

log = logging.getLogger("rolloutmq.trainer")


class Learner:
    """Owns the model of `model_dir` and trains it; `step` counts optimizer steps.

    Raises ModelError.
    """

    def __init__(
        self,
        model_dir: Path,
        config: LearnerConfig,
        *,
        device: str = "cpu",
        seed: int = 0,
        ranks: Ranks = ALONE,
        columns: ColumnFolder = NO_FILES,
        teacher_weights: TeacherWeights | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.bf16 = choose_bf16(config, self.device)
        self.ranks = ranks
        self.step = 0
        self.skipped_in_a_row = 0  # steps whose gradient was not finite
        # frozen weights need no more precision than the forward pass has
        frozen = torch.bfloat16 if config.lora and self.bf16 else None
        self._host = HostBuffers()
        self._policy = load_policy(
            model_dir, config, self.device, ranks, bf16=self.bf16, dtype=frozen
        )
        self.model = self._policy.model.train()
        # here: the adapter does not depend on what loading the model drew
        torch.manual_seed(seed)
        self._adapter = (
            Adapter(self.model, config.lora, model_checksum(model_dir)) if config.lora else None
        )
        # before any forward pass: FSDP may leave gathered tensors in their place
        self.parameters: dict[str, torch.nn.Parameter] = (
            self._adapter.parameters() if self._adapter else dict(self.model.named_parameters())
        )
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        fp32 = config.fp32_logits
        self._policy.fp32_logits = self.device.type == "cuda" if fp32 == "auto" else fp32
        replay = RoutingReplay(self.model) if config.replay_routing else None
        self._policy.replay = replay
        # None: experts are not replayed
        self.recorded = replay.recorded_experts(columns) if replay else None
        check_logprobs(self._policy)
        self.vocabulary = vocabulary_of(self.model)  # token ids that the model reads and predicts
        needed = not config.allow_truncated_sampling
        self.masks = MaskReader(self.vocabulary, columns, needed=needed)
        share_rows = keeps_samples_apart(self._policy)
        self._packer = Packer(
            config.token_budget,
            share_rows=share_rows,
            recorded=self.recorded,
            masks=self.masks,
            device=self.device,
        )
        self.reference = self._load_reference(model_dir) if config.loss.has_own_reference else None
        self._distillation = Distillation.of(config, teacher_weights or {})
        load_objective(config.loss.objective)  # before hours of rollouts, where it does not exist
        self._optimizer = make_optimizer(
            config.optimizer,
            self.parameters.values(),
            rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            ranks=ranks.size,
        )

    def keep(self, advantages: NDArray[np.float32]) -> NDArray[np.bool_] | None:
        """Return which rollouts need a forward pass, bool[sum k]; None: all of them.

        By an objective of ours, a rollout with advantage 0 has no policy gradient; it still counts
        in the loss's divisors.
        """
        loss = self.config.loss
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
        updates = []
        for part in np.array_split(np.arange(len(groups)), self.config.updates_per_batch):
            # with several ranks, all take part in every update, also one without groups
            if len(part) or self.ranks.size > 1:
                updates.append(self._pack_update(table, kept, np.isin(table.group, part)))
        return TrainBatch(groups, updates)

    @torch.no_grad()
    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Compute the log-probabilities under the weights before this batch.

        Leaves the batch as it is unless the ratio is to them and there are several updates.
        """
        if self._needs_old_logprobs:
            for update in batch.updates:
                update.old_logprobs = [self.logprobs(part) for part in update.batches]
        return batch

    @torch.no_grad()
    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Compute the logprobs under the reference of the KL, unless `kl_coef` is 0."""
        teacher = self.config.loss.kl_reference
        for update in batch.updates:
            if self.reference:
                update.ref_logprobs = [self._reference_logprobs(part) for part in update.batches]
            elif teacher:
                update.ref_logprobs = update.batches.column(f"teacher_logprobs/{teacher}")
        return batch

    @torch.no_grad()
    def compute_energies(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Return the squared norm of each token's logit gradient, float32[R] of each group.

        It is `1 - 2 p + sum of p^2 over all words`, and 0 where a token was not sampled.
        """
        self._policy.collision = True
        energies = [np.zeros(len(group.mask), np.float32) for group in batch.groups]
        for update in batch.updates:
            found = []
            for part in update.batches:
                scores = self._score(self._policy, part)
                assert scores.collision is not None
                found.append(1 - 2 * scores.logprobs.exp() + scores.collision)
            update.batches.fill(energies, found)
        self._policy.collision = False
        return [own * g.sampled_mask for own, g in zip(energies, batch.groups, strict=True)]

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Take the optimizer steps of a batch whose advantages are set; return the metrics.

        Metrics are means over trained tokens; `optim/*` and `loss/policy` over optimizer steps. A
        step whose gradient is not finite is skipped and counts in `optim/skipped_updates`. Raises
        ConfigError where the loss lacks log-probabilities, GradientNotFinite after
        `max_skipped_updates` such steps in a row.
        """
        needed = {
            "old_logprobs": self._needs_old_logprobs,
            "ref_logprobs": self.config.loss.kl_coef > 0,
        }
        for name, is_needed in needed.items():
            if is_needed and any(
                len(getattr(update, name)) < len(update.batches) for update in batch.updates
            ):
                raise ConfigError(f"the batch has no {name}", hint=f"call compute_{name} first")
        return mean_metrics([self._update(update) for update in batch.updates], "optim")

    @property
    def _needs_old_logprobs(self) -> bool:
        return self.config.updates_per_batch > 1 and not self.config.is_against_rollout

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of the targets, float32[N]."""
        return self._score(self._policy, batch).logprobs

    def state_tensors(self) -> dict[str, Tensor]:
        """Return what a resume of this rank needs, on the CPU (see `learner_state.py`)."""
        state = capture(self.parameters, self._optimizer, self.step, self.device)
        state["skipped"] = torch.tensor(self.skipped_in_a_row)
        return state | (self._adapter.state_tensors() if self._adapter else {})

    def shard_rows(self) -> dict[str, Rows]:
        return shard_rows(self.parameters)

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors()`.

        Raises ModelError, and changes nothing, for another's.
        """
        if self._adapter:
            self._adapter.check_state(state)
        self.step = restore(state, self.parameters, self._optimizer, self.device)
        self.skipped_in_a_row = int(state["skipped"])

    def on_device(self) -> tuple[list[torch.nn.Module], torch.optim.Optimizer]:
        # without a second model the reference is the policy: each module once
        modules = dict.fromkeys((self._policy, self.reference))
        return [module for module in modules if module is not None], self._optimizer

    def snapshot(self, *, to_publish: bool = False) -> WeightsSnapshot:
        """Copy the weights to host memory until the next snapshot; all ranks must call it.

        It writes config.json and safetensors, or a LoRA adapter's files. `to_publish`: copy the
        precision of the forward pass, which halves the bytes with `bf16`.
        """
        dtype = torch.bfloat16 if to_publish and self.bf16 else None
        if self._adapter is None:
            return snapshot_weights(self.model, self.ranks, self._host, dtype=dtype)
        return self._adapter.snapshot(dtype=dtype, is_writer=self.ranks.rank == 0)

    def save_weights(self, folder: Path, *, to_publish: bool = False) -> None:
        self.snapshot(to_publish=to_publish).write(folder)

    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that this process has allocated on its GPU; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)

    def _score(
        self, policy: TargetLogits, batch: MicroBatch, *, entropy_gradient: bool = True
    ) -> TokenLogprobs:
        return token_logprobs(
            policy,
            batch,
            temperature=self.config.temperature,
            bf16=self.bf16,
            entropy_gradient=entropy_gradient,
        )

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        assert self.reference
        with self._adapter.disabled() if self._adapter else nullcontext():
            # the reference chooses its experts itself
            return self._score(self.reference, replace(batch, experts=None)).logprobs

    def _load_reference(self, model_dir: Path) -> TargetLogits:
        """Return the folder's model: also after a resume, KL is measured to the start."""
        if self._adapter:
            return self._policy
        reference = load_policy(
            model_dir, self.config, self.device, self.ranks, bf16=self.bf16
        ).eval()
        reference.transform = self._policy.transform
        reference.fp32_logits = self._policy.fp32_logits
        return reference

    def _pack_update(
        self, table: BatchTable, keep: NDArray[np.bool_], part: NDArray[np.bool_]
    ) -> Update:
        """Pack the rollouts that are in `part`, bool[S], and kept."""
        batches = self._packer.pack_pad_dispatch(table, keep=keep & part)
        batches.pad(self.ranks.max(len(batches)))
        own_tokens = int(table.trained[part].sum())
        counted = [group.in_training for group in table.groups]
        own_samples = int((part & np.concatenate([np.zeros(0, np.bool_), *counted])).sum())
        tokens, samples = self.ranks.sum([own_tokens, own_samples])
        gids = [table.groups[n].gid for n in np.unique(table.group[part]).tolist()]
        return Update(batches, tokens, int(samples), gids)

    def _update(self, update: Update) -> dict[str, float] | None:
        """Take one optimizer step and return its metrics; None where it was skipped."""
        sums: Counter[str] = Counter()
        self._optimizer.zero_grad(set_to_none=True)
        for index in range(len(update.batches)):
            sums.update(self._backward(update, index))
        sums = Counter(dict(zip(sums, self.ranks.sum(list(sums.values())), strict=True)))
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
        loss_config = self.config.loss
        batch = update.batches[index]
        current = self._score(self._policy, batch, entropy_gradient=loss_config.entropy_coef > 0)
        samples = Samples(batch.mask, batch.sample, batch.trained_tokens)
        columns = TokenColumns(
            logprobs=current.logprobs,
            old_logprobs=self._old_logprobs(update, index, current.logprobs),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=update.advantages[index],
            samples=samples,
            entropy=current.entropy,
            ref_logprobs=update.ref_logprobs[index] if update.ref_logprobs else None,
            optional=batch.optional,
            old_is_rollout=self.config.is_against_rollout,
        )
        if self._distillation:
            columns = self._distillation.apply(columns, batch, current.others)
        weights = token_weights(
            samples, loss_config, batch_tokens=update.tokens, batch_samples=update.samples
        )
        loss, metrics = policy_loss(columns, weights, loss_config)
        is_last = index == len(update.batches) - 1
        set_gradient_sync(self._policy, is_last=is_last, config=self.config.sharding)
        # gradients are averaged over ranks, and the loss is a sum over them
        torch.autograd.backward(loss * self.ranks.size)
        # one transfer from the device for all of them
        values = torch.stack([loss.detach(), batch.mask.sum(), *metrics.values()]).tolist()
        return dict(zip(["loss/policy", "tokens", *metrics], values, strict=True))

    def _old_logprobs(self, update: Update, index: int, current: Tensor) -> Tensor:
        if self.config.is_against_rollout:
            return update.batches[index].rollout_logprobs
        return update.old_logprobs[index] if update.old_logprobs else current.detach()

    def _optimize(self, update: Update) -> dict[str, float] | None:
        rate = scheduled_rate(self.config, self.step)
        self.step += 1
        if not update.batches:
            # no gradient: a step would still move the weights by the decaying moments
            return {"optim/grad_norm": 0.0, "optim/learning_rate": rate}
        set_rate(self._optimizer, rate)
        if self._adapter:
            average_gradients(self.parameters.values(), self.ranks)
        norm = gradient_step(self._optimizer, self.config.max_grad_norm)
        if norm is None:
            self._skip(update)
            return None
        self.skipped_in_a_row = 0
        return {"optim/grad_norm": norm, "optim/learning_rate": rate}

    def _skip(self, update: Update) -> None:
        self.skipped_in_a_row += 1
        what = (
            f"the gradient of optimizer step {self.step} is not finite: no weight was changed. "
            f"Its groups: {', '.join(update.gids)}"
        )
        log.error(what)
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise GradientNotFinite(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped; {what}",
                hint="lower [learner] learning_rate, then restart from an older checkpoint: the "
                "weights may be where gradients overflow; or raise [learner] max_skipped_updates",
            )
