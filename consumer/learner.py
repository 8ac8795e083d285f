"""The learner: a model, its optimizer and the steps that turn rollouts into new weights, on one device.

Parameters and optimizer state are float32; with `bf16` the forward pass runs in bfloat16 (autocast).

Invariant: a learner that loads the state of another one continues exactly as that one would have, bit for bit
(same machine, same number of threads). What decides a step is in the state, the config or the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import ModelError
from consumer.importance import Samples
from consumer.learner_config import LearnerConfig
from consumer.learner_state import capture, restore
from consumer.losses import TokenColumns, policy_loss, token_weights
from consumer.model_folder import load_model, save_model
from consumer.packing import GroupColumns, MicroBatch, Packer
from consumer.token_logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class _Part:
    """The rollouts of one optimizer step, with what the loss divides by."""

    batches: list[MicroBatch]
    old_logprobs: list[Tensor]
    tokens: float
    samples: int


class Learner:
    """Owns the model of `model_dir` and trains it; `step` counts optimizer steps.

    Raises ModelError where the folder is unusable.
    """

    def __init__(self, model_dir: Path, config: LearnerConfig, *, device: str = "cpu", seed: int = 0) -> None:
        self.config, self.device, self.step = config, torch.device(device), 0
        torch.manual_seed(seed)
        self.model = load_model(model_dir).to(self.device).train()
        self.parameters = dict(self.model.named_parameters())
        # The reference is the model of the folder for good, also after a resume: KL is measured to the start.
        with_reference = config.loss.kl_coef > 0
        self.reference = load_model(model_dir).to(self.device).eval() if with_reference else None
        self._packer = Packer(config.token_budget)
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
        ends = np.cumsum([0, *(len(group.lengths) for group in groups)])
        cuts = np.array_split(np.arange(len(groups)), self.config.updates_per_batch)
        # Every part is prepared before the first update: all are clipped against the same old policy.
        parts = [
            self._prepare(groups[cut[0] : cut[-1] + 1], advantages[ends[cut[0]] : ends[cut[-1] + 1]])
            for cut in cuts
            if len(cut)
        ]
        return _mean([self._update(part) for part in parts])

    def learning_rate(self) -> float:
        """The rate of the next optimizer step: a function of `step` alone, so no schedule is saved."""
        config = self.config
        rate = config.learning_rate * min(1.0, (self.step + 1) / max(1, config.warmup_steps))
        if config.decay_steps is None:
            return rate
        left = max(0.0, 1.0 - self.step / config.decay_steps)
        return rate * (config.final_rate + (1.0 - config.final_rate) * left)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs, on the CPU; names in `consumer.learner_state`."""
        return capture(self.parameters, self._optimizer, self.step, self.device)

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors()`. ModelError, and nothing changed, if they are of another model."""
        self.step = restore(state, self.parameters, self._optimizer, self.device)

    def save_weights(self, folder: Path, *, to_publish: bool = False) -> None:
        """Write config.json and safetensors weights into `folder`, as Hugging Face and vLLM read them.

        `to_publish`: in the numbers that the forward pass uses. With `bf16` that halves the bytes; an engine in
        bfloat16 would round them to the same.
        """
        save_model(self.model, folder, dtype=torch.bfloat16 if to_publish and self.config.bf16 else None)

    def peak_memory_bytes(self) -> int | None:
        """The most this process has allocated on its GPU so far; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the batch's targets under the present weights, float32[N]."""
        return token_logprobs(self.model, batch, temperature=self.config.temperature, bf16=self.config.bf16).logprobs

    def _prepare(self, groups: Sequence[GroupColumns], advantages: NDArray[np.float32]) -> _Part:
        packed = self._packer.pack(groups, advantages, keep=self._keep(advantages))
        batches = [batch.to(self.device) for batch in packed]
        # With one update, the weights before the batch are those of its forward pass: no pass of their own.
        current = self.config.old_policy == "current" and self.config.updates_per_batch > 1
        return _Part(
            batches=batches,
            old_logprobs=[self.logprobs(b) for b in batches] if current else [],
            tokens=float(sum(int(group.mask.sum()) for group in groups)),
            samples=len(advantages),
        )

    def _keep(self, advantages: NDArray[np.float32]) -> NDArray[np.bool_] | None:
        # A rollout without advantage has no policy gradient. It still counts in the divisors, so leaving out
        # its forward pass changes nothing but the time.
        loss = self.config.loss
        return None if loss.kl_coef or loss.entropy_coef else advantages != 0

    def _update(self, part: _Part) -> dict[str, float]:
        sums: Counter[str] = Counter()
        self._optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(part.batches):
            sums.update(self._backward(part, batch, number))
        metrics = {"loss/policy": sums.pop("loss/policy", 0.0)}
        computed = max(1.0, sums.pop("tokens", 0.0))
        metrics |= {name: value / computed for name, value in sums.items()}
        return metrics | {"batch/trained_share": computed / max(1.0, part.tokens)} | self._optimize(part)

    def _backward(self, part: _Part, batch: MicroBatch, number: int) -> dict[str, float]:
        config = self.config
        now = token_logprobs(
            self.model,
            batch,
            temperature=config.temperature,
            bf16=config.bf16,
            entropy_gradient=config.loss.entropy_coef > 0,
        )
        samples = Samples(batch.mask, batch.sample, batch.trained_tokens)
        columns = TokenColumns(
            logprobs=now.logprobs,
            old_logprobs=self._old_logprobs(part, batch, number, now.logprobs),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages[batch.sample],
            samples=samples,
            entropy=now.entropy,
            ref_logprobs=self._reference_logprobs(batch),
        )
        weights = token_weights(samples, config.loss, batch_tokens=part.tokens, batch_samples=part.samples)
        loss, metrics = policy_loss(columns, weights, config.loss)
        torch.autograd.backward(loss)
        values = torch.stack([loss.detach(), batch.mask.sum(), *metrics.values()]).tolist()
        return dict(zip(["loss/policy", "tokens", *metrics], values, strict=True))

    def _old_logprobs(self, part: _Part, batch: MicroBatch, number: int, now: Tensor) -> Tensor:
        if self.config.old_policy == "rollout":
            return batch.rollout_logprobs
        return part.old_logprobs[number] if part.old_logprobs else now.detach()

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        config = self.config
        return token_logprobs(self.reference, batch, temperature=config.temperature, bf16=config.bf16).logprobs

    def _optimize(self, part: _Part) -> dict[str, float]:
        rate = self.learning_rate()
        self.step += 1
        if not part.batches:  # nothing to learn from: no step, or decaying moments would move the weights
            return {"optim/grad_norm": 0.0, "optim/learning_rate": rate}
        self._optimizer.param_groups[0]["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
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
