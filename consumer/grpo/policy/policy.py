"""The policy: its model or LoRA adapter, the optimizer, and the forward passes over micro-batches.

Parameters and optimizer state are float32 (moments of adamw_8bit: 8 bits); with `bf16`, forward
passes run in bfloat16. Several ranks shard both (FSDP2), except a LoRA adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from buffer.maintenance.column_files import NO_FILES, ColumnFolder
from buffer.weights.safetensors_files import model_checksum
from consumer.config.learner import LearnerConfig
from consumer.grpo.model_state.learner_state import TrainedModel
from consumer.grpo.model_state.optimizers import make_optimizer
from consumer.grpo.model_state.weights_folder import HostBuffers, WeightsSnapshot, snapshot_weights
from consumer.grpo.models.device_choices import choose_bf16
from consumer.grpo.policy.column_readers import ColumnReader, MaskReader
from consumer.grpo.policy.logprobs import TargetLogits, token_logprobs
from consumer.grpo.policy.lora import Adapter
from consumer.grpo.policy.micro_batch import MicroBatch, Packer
from consumer.grpo.policy.model_checks import check_logprobs, keeps_samples_apart
from consumer.grpo.policy.policy_loading import load_policy
from consumer.grpo.policy.routing_replay import RecordedExperts, RoutingReplay
from consumer.grpo.policy.vocabulary_projection import TokenLogprobs
from consumer.handle.ranks import ALONE, Ranks


class Policy(TrainedModel):
    """The model of `model_dir` as [learner] trains it. Raises ModelError."""

    def __init__(
        self,
        model_dir: Path,
        config: LearnerConfig,
        *,
        device: str = "cpu",
        seed: int = 0,
        ranks: Ranks = ALONE,
        columns: ColumnFolder = NO_FILES,
    ) -> None:
        self.config = config
        self.ranks = ranks
        place = torch.device(device)
        self.bf16 = choose_bf16(config, place)
        self._host = HostBuffers()
        # frozen weights need no more precision than the forward pass has
        frozen = torch.bfloat16 if config.lora and self.bf16 else None
        self.logits = load_policy(model_dir, config, place, ranks, bf16=self.bf16, dtype=frozen)
        self.model = self.logits.model.train()
        # here: the adapter does not depend on what loading the model drew
        torch.manual_seed(seed)
        self._adapter = (
            Adapter(self.model, config.lora, model_checksum(model_dir)) if config.lora else None
        )
        # before any forward pass: FSDP may leave gathered tensors in their place
        parameters: dict[str, torch.nn.Parameter] = (
            self._adapter.parameters() if self._adapter else dict(self.model.named_parameters())
        )
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        fp32 = config.fp32_logits
        self.logits.fp32_logits = place.type == "cuda" if fp32 == "auto" else fp32
        replay = RoutingReplay(self.model) if config.replay_routing else None
        self.logits.replay = replay
        check_logprobs(self.logits)
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        # token ids that the model reads and predicts
        self.vocabulary = min(int(table.weight.shape[0]) for table in tables)
        needed = not config.allow_truncated_sampling
        masks = MaskReader(self.vocabulary, columns, needed=needed)
        self.readers: list[ColumnReader] = [masks]
        if replay:
            shape = (replay.layers, replay.top_k, replay.experts)
            self.readers.insert(0, RecordedExperts(*shape, columns))
        self.packer = Packer(
            config.token_budget,
            share_rows=keeps_samples_apart(self.logits),
            readers=self.readers,
            device=place,
        )
        optimizer = make_optimizer(
            config.optimizer,
            parameters.values(),
            rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            ranks=ranks.size,
        )
        super().__init__(parameters, optimizer, place, [self.logits])
        self.reference = self._load_reference(model_dir) if config.loss.has_own_reference else None

    def _load_reference(self, model_dir: Path) -> TargetLogits:
        """Return the folder's model: also after a resume, KL is measured to the start."""
        if self._adapter:
            return self.logits
        reference = load_policy(
            model_dir, self.config, self.device, self.ranks, bf16=self.bf16
        ).eval()
        reference.transform = self.logits.transform
        reference.fp32_logits = self.logits.fp32_logits
        self.modules.append(reference)
        return reference

    def score(
        self,
        batch: MicroBatch,
        *,
        logits: TargetLogits | None = None,
        entropy_gradient: bool = True,
    ) -> TokenLogprobs:
        """Return log-probability and entropy of the targets; `logits`: of another model."""
        return token_logprobs(
            logits or self.logits,
            batch,
            temperature=self.config.temperature,
            bf16=self.bf16,
            entropy_gradient=entropy_gradient,
        )

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of the targets, float32[N]."""
        return self.score(batch).logprobs

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of the targets under the reference of the KL, float32[N]."""
        with self._adapter.disabled() if self._adapter else nullcontext():
            # the reference chooses its experts itself
            recorded = {**batch.recorded, RecordedExperts.name: None}
            return self.score(replace(batch, recorded=recorded), logits=self.reference).logprobs

    @torch.no_grad()
    def energies(self, batch: MicroBatch) -> Tensor:
        """Return the squared norm of each target's logit gradient, float32[N].

        It is `1 - 2 p + sum of p^2 over all words`.
        """
        self.logits.collision = True
        scores = self.score(batch)
        self.logits.collision = False
        assert scores.collision is not None
        return 1 - 2 * scores.logprobs.exp() + scores.collision

    def state_tensors(self) -> dict[str, Tensor]:
        return super().state_tensors() | (self._adapter.state_tensors() if self._adapter else {})

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        if self._adapter:
            self._adapter.check_state(state)
        super().load_state_tensors(state)

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
