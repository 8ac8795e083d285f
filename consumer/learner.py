"""The learner: a model, its optimizer and the steps that turn rollouts into new weights, on one device or on several.

Parameters and optimizer state are float32; with `bf16` the forward pass runs in bfloat16 (autocast). With several ranks
they are sharded (FSDP2): each rank has its own rollouts, and the loss divides by the counts of all, so that the
gradient is that of one rank with the whole batch.

Invariant: a learner that loads the state of another one continues exactly as that one would have, bit for bit
(same machine, same number of threads). What decides a step is in the state, the config or the arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from buffer.errors import ConfigError, ModelError
from buffer.media import MediaFolder
from buffer.weights.safetensors_files import model_checksum
from consumer.adapter import Adapter
from consumer.importance import Samples
from consumer.learner_config import LearnerConfig
from consumer.learner_state import capture, restore
from consumer.losses import TokenColumns, derived_metrics, policy_loss, token_weights
from consumer.model_folder import load_model, save_model
from consumer.packing import GroupColumns, MicroBatch, Packer
from consumer.ranks import ALONE, Ranks
from consumer.recorded_experts import RecordedExperts
from consumer.routing_replay import RoutingReplay
from consumer.row_sharing import keeps_samples_apart
from consumer.sharding import shard, whole, write_weights
from consumer.target_logits import TargetLogits
from consumer.token_logprobs import token_logprobs
from consumer.train_batch import TrainBatch, Update


class Learner:
    """Owns the model of `model_dir` and trains it; `step` counts optimizer steps.

    Raises ModelError where the folder is unusable.
    """

    def __init__(
        self,
        model_dir: Path,
        config: LearnerConfig,
        *,
        device: str = "cpu",
        seed: int = 0,
        ranks: Ranks = ALONE,
        media: MediaFolder | None = None,
    ) -> None:
        self.config, self.device, self.step, self.ranks = config, torch.device(device), 0, ranks
        torch.manual_seed(seed)
        # what is not trained needs no more digits than the forward pass has
        frozen = torch.bfloat16 if config.lora and config.bf16 else None
        self.model = load_model(model_dir, dtype=frozen).to(self.device).train()
        self._adapter = self._add_adapter(model_dir)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        replay = RoutingReplay(self.model) if config.replay_routing else None
        self.recorded = RecordedExperts(replay.layers, replay.top_k, replay.experts, media) if replay else None
        """of what workers say the gates chose, where that is replayed"""
        share_rows = keeps_samples_apart(self.model)
        self._packer = Packer(config.token_budget, share_rows=share_rows, recorded=self.recorded)
        self._policy = self._module(self.model, replay)
        self.parameters = self._adapter.parameters() if self._adapter else dict(self.model.named_parameters())
        self.reference = self._load_reference(model_dir) if config.loss.kl_coef > 0 else None
        self._optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def train_step(self, groups: Sequence[GroupColumns], advantages: NDArray[np.float32]) -> dict[str, float]:
        """Train on one batch; `advantages` float32[sum k] as `consumer.advantages` returns them.

        Returns metrics: means over the trained tokens; `optim/*`, `loss/policy`: means over optimizer steps.
        """
        batch = self.pack(groups, keep=self.keep(advantages))
        batch.set_advantages(advantages)
        # With one update, the weights before the batch are those of its forward pass: no pass of their own.
        if self.config.old_policy == "current" and self.config.updates_per_batch > 1:
            self.compute_old_logprobs(batch)
        return self.train(batch)

    def pack(self, groups: Sequence[GroupColumns], *, keep: NDArray[np.bool_] | None = None) -> TrainBatch:
        """This rank's groups as micro-batches, cut into optimizer steps; the same number of both on all ranks."""
        ends = np.cumsum([0, *(len(group.lengths) for group in groups)])
        cuts = np.array_split(np.arange(len(groups)), self.config.updates_per_batch)
        wanted = np.ones(ends[-1], np.bool_) if keep is None else keep
        updates = []
        for cut in cuts:
            if len(cut) or self.ranks.size > 1:
                first, last = (int(cut[0]), int(cut[-1]) + 1) if len(cut) else (0, 0)
                start, end = int(ends[first]), int(ends[last])
                updates.append(self._pack_update(groups[first:last], wanted[start:end], start))
        return TrainBatch(groups, updates)

    @torch.no_grad()
    def compute_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Of the weights before this batch: what `old_policy = "current"` clips all of its updates against."""
        for update in batch.updates:
            update.old_logprobs = [self.logprobs(part) for part in update.batches]
        return batch

    @torch.no_grad()
    def compute_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Of the model that training started from; nothing where no KL term asks for it."""
        for update in batch.updates if self.reference else []:
            update.ref_logprobs = [self._of_reference(part) for part in update.batches]
        return batch

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """The optimizer steps of a batch that has its advantages; metrics as of `train_step`."""
        return _mean([self._update(update) for update in batch.updates])

    def keep(self, advantages: NDArray[np.float32]) -> NDArray[np.bool_] | None:
        """Which rollouts are worth a forward pass: one without advantage has no policy gradient. It still counts in the
        divisors, so that leaving it out changes nothing but the time."""
        loss = self.config.loss
        return None if loss.kl_coef or loss.entropy_coef else advantages != 0

    def learning_rate(self) -> float:
        """The rate of the next optimizer step: a function of `step` alone, so no schedule is saved."""
        config = self.config
        rate = config.learning_rate * min(1.0, (self.step + 1) / max(1, config.warmup_steps))
        if config.decay_steps is None:
            return rate
        left = max(0.0, 1.0 - self.step / config.decay_steps)
        if config.schedule == "cosine":
            left = (1.0 - math.cos(math.pi * left)) / 2
        return rate * (config.final_rate + (1.0 - config.final_rate) * left)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs of this rank, on the CPU; names in `consumer.learner_state`."""
        identity = self._adapter.state_tensors() if self._adapter else {}
        return identity | capture(self.parameters, self._optimizer, self.step, self.device)

    def on_device(self) -> tuple[list[torch.nn.Module], torch.optim.Optimizer]:
        """What of it takes memory of the device, for `DeviceShare`."""
        modules = dict.fromkeys((self._policy, self.reference))
        return [module for module in modules if module is not None], self._optimizer

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors()`. ModelError, and nothing changed, if they are of another model."""
        if self._adapter:
            self._adapter.check_state(state)
        self.step = restore(state, self.parameters, self._optimizer, self.device)

    def save_weights(self, folder: Path, *, to_publish: bool = False) -> None:
        """Write config.json and safetensors weights into `folder`, as Hugging Face and vLLM read them; of an adapter,
        what PEFT and vLLM read.

        `to_publish`: in the numbers that the forward pass uses. With `bf16` that halves the bytes; an engine in
        bfloat16 would round them to the same. With several ranks each writes its share: all must call it.
        """
        dtype = torch.bfloat16 if to_publish and self.config.bf16 else None
        if self._adapter:
            self._adapter.save(folder, dtype=dtype)
            return
        if self.ranks.size == 1:
            save_model(self.model, folder, dtype=dtype)
            return
        write_weights(self.parameters, folder, self.ranks, dtype=dtype)
        if self.ranks.rank == 0:
            self.model.config.save_pretrained(folder)

    def peak_memory_bytes(self) -> int | None:
        """The most this process has allocated on its GPU so far; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the batch's targets under the present weights, float32[N]."""
        return self._score(self._policy, batch)

    def _score(self, policy: TargetLogits, batch: MicroBatch) -> Tensor:
        return token_logprobs(policy, batch, temperature=self.config.temperature, bf16=self.config.bf16).logprobs

    @torch.no_grad()
    def _of_reference(self, batch: MicroBatch) -> Tensor:
        assert self.reference
        with self._adapter.off() if self._adapter else nullcontext():
            return self._score(self.reference, replace(batch, experts=None))

    def _load_reference(self, model_dir: Path) -> TargetLogits:
        """The model of the folder for good, also after a resume: KL is measured to the start."""
        return self._policy if self._adapter else self._module(load_model(model_dir).to(self.device).eval())

    def _add_adapter(self, model_dir: Path) -> Adapter | None:
        if self.config.lora is None:
            return None
        if self.ranks.size > 1:
            raise ConfigError("a LoRA adapter trains on one rank only", hint="leave out [learner.lora], or use one GPU")
        return Adapter(self.model, self.config.lora, model_checksum(model_dir))

    def _module(self, model: PreTrainedModel, replay: RoutingReplay | None = None) -> TargetLogits:
        policy = TargetLogits(model, replay)
        return shard(policy, self.device) if self.ranks.size > 1 else policy

    def _pack_update(self, groups: Sequence[GroupColumns], keep: NDArray[np.bool_], first: int) -> Update:
        """`first`: the number of the first rollout in the batch."""
        batches = self._packer.pack_pad_dispatch(groups, keep=keep)
        batches = self._packer.pad(batches, self.ranks.max(len(batches)))
        tokens, samples = self.ranks.sum([sum(int(group.mask.sum()) for group in groups), len(keep)])
        return Update([batch.numbered_from(first).to(self.device) for batch in batches], tokens, int(samples))

    def _update(self, update: Update) -> dict[str, float]:
        sums: Counter[str] = Counter()
        self._optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(update.batches):
            sums.update(self._backward(update, batch, number))
        sums = Counter(dict(zip(sums, self.ranks.sum(list(sums.values())), strict=True)))
        metrics = {"loss/policy": sums.pop("loss/policy", 0.0)}
        computed = max(1.0, sums.pop("tokens", 0.0))
        metrics |= derived_metrics({name: value / computed for name, value in sums.items()})
        return metrics | {"batch/trained_share": computed / max(1.0, update.tokens)} | self._optimize(update)

    def _backward(self, update: Update, batch: MicroBatch, number: int) -> dict[str, float]:
        config = self.config
        # first: what gates are told must still hold when the backward pass computes checkpointed layers again
        ref_logprobs = self._ref_logprobs(update, batch, number)
        now = token_logprobs(
            self._policy,
            batch,
            temperature=config.temperature,
            bf16=config.bf16,
            entropy_gradient=config.loss.entropy_coef > 0,
        )
        samples = Samples(batch.mask, batch.sample, batch.trained_tokens)
        columns = TokenColumns(
            logprobs=now.logprobs,
            old_logprobs=self._old_logprobs(update, batch, number, now.logprobs),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=update.advantages[number],
            samples=samples,
            entropy=now.entropy,
            ref_logprobs=ref_logprobs,
        )
        weights = token_weights(samples, config.loss, batch_tokens=update.tokens, batch_samples=update.samples)
        loss, metrics = policy_loss(columns, weights, config.loss)
        torch.autograd.backward(loss * self.ranks.size)  # FSDP takes the mean over ranks; the loss is a sum over them
        values = torch.stack([loss.detach(), batch.mask.sum(), *metrics.values()]).tolist()
        return dict(zip(["loss/policy", "tokens", *metrics], values, strict=True))

    def _old_logprobs(self, update: Update, batch: MicroBatch, number: int, now: Tensor) -> Tensor:
        if self.config.old_policy == "rollout":
            return batch.rollout_logprobs
        return update.old_logprobs[number] if update.old_logprobs else now.detach()

    def _ref_logprobs(self, update: Update, batch: MicroBatch, number: int) -> Tensor | None:
        if self.reference is None:
            return None
        return update.ref_logprobs[number] if update.ref_logprobs else self._of_reference(batch)

    def _optimize(self, update: Update) -> dict[str, float]:
        rate = self.learning_rate()
        self.step += 1
        if not update.batches:  # nothing to learn from: no step, or decaying moments would move the weights
            return {"optim/grad_norm": 0.0, "optim/learning_rate": rate}
        self._optimizer.param_groups[0]["lr"] = rate
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm))
        if not torch.isfinite(norm):
            raise ModelError(
                f"the gradient of optimizer step {self.step} is not finite; the weights were not changed",
                hint="restart from the checkpoint with a lower learner.learning_rate; look at the batch's logprobs",
            )
        self._optimizer.step()
        return {"optim/grad_norm": float(norm), "optim/learning_rate": rate}


def _mean(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the updates that have it: one without anything to learn has fewer."""
    names = dict.fromkeys(name for update in updates for name in update)
    values = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: sum(column) / len(column) for name, column in values.items()}
