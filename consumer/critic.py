"""A critic: the policy's architecture with one number per token in place of the vocabulary.

(PPO, Schulman et al. 2017, arXiv:1707.06347.) Its values are what generalized advantage estimation compares a reward
with; estimators that compare the rollouts of a group need none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from consumer.critic_config import CriticConfig
from consumer.learner_state import capture, restore
from consumer.model_folder import load_model
from consumer.packing import MicroBatch


class Critic:
    """Starts as the model of `model_dir` with a value head of zeros: it expects nothing yet."""

    def __init__(self, model_dir: Path, config: CriticConfig, *, device: str = "cpu", seed: int = 0) -> None:
        self.config, self.device, self.step = config, torch.device(device), 0
        torch.manual_seed(seed)
        body = load_model(model_dir).base_model
        self.head = nn.Linear(body.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.body, self.head = body.to(self.device).train(), self.head.to(self.device)
        self.parameters = {f"body.{name}": p for name, p in self.body.named_parameters()}
        self.parameters |= {f"head.{name}": p for name, p in self.head.named_parameters()}
        self._optimizer = torch.optim.AdamW(self.parameters.values(), lr=config.learning_rate, weight_decay=0.0)

    def on_device(self) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        """What of it takes memory of the device, for `DeviceShare`."""
        return [self.body, self.head], self._optimizer

    @torch.no_grad()
    def values(self, batch: MicroBatch) -> Tensor:
        """What the rest of a rollout is worth, before each of its N response tokens: float32[N]."""
        return self._forward(batch)

    def update(
        self, batches: Sequence[MicroBatch], old: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> dict[str, float]:
        """One optimizer step towards `returns`, float32[N] for each micro-batch; `old` are the values before it."""
        tokens = max(1.0, sum(float(batch.mask.sum()) for batch in batches))
        self._optimizer.zero_grad(set_to_none=True)
        total, explained = 0.0, 0.0
        for batch, before, wanted in zip(batches, old, returns, strict=True):
            values = self._forward(batch)
            loss = value_loss(values, before, wanted, batch.mask, self.config.clip) / tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
            explained += float(((wanted - before) * batch.mask).abs().sum()) / tokens
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        self._optimizer.step()
        self.step += 1
        return {"critic/loss": total, "critic/abs_error": explained, "critic/grad_norm": float(norm)}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs but the random state; as of `consumer.learner_state`."""
        return capture(self.parameters, self._optimizer, self.step, self.device)

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        self.step = restore(state, self.parameters, self._optimizer, self.device)

    def _forward(self, batch: MicroBatch) -> Tensor:
        hidden = self.body(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1).index_select(0, batch.logit_index)).squeeze(1)
        return values


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Half the squared error, summed over trained tokens: a scalar from float32[N] each.

    With `clip` c, the larger one of that and of the error of `old + clip(values - old, -c, c)`, so that a value moves
    by at most c at a time (the clipped value loss that came with PPO's code).
    """
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return torch.where(mask > 0, error, 0.0).sum() / 2


def packed_gae(
    rewards: Tensor, values: Tensor, batch: MicroBatch, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each of the N tokens of a micro-batch, float32[N] each.

    `rewards` float32[S] stand at the last trained token of each sample. Tokens that are not trained (a tool's) are no
    actions of the policy: they are passed over, and get 0. (Schulman et al. 2016, arXiv:1506.02438, equation 16.)
    """
    advantages, following = torch.zeros_like(values), torch.zeros_like(rewards)
    next_value, reward = torch.zeros_like(rewards), rewards.clone()
    trained = torch.nonzero(batch.mask > 0).squeeze(1)
    for places in _columns_from_the_end(batch.sample[trained]):
        at = trained[places]
        of = batch.sample[at]
        surprise = reward[of] + gamma * next_value[of] - values[at]
        following[of] = surprise + gamma * lam * following[of]
        advantages[at], next_value[of], reward[of] = following[of], values[at], 0.0
    return advantages, (advantages + values) * (batch.mask > 0)


def _columns_from_the_end(sample: Tensor) -> list[Tensor]:
    """The last token of every sample, then the one before it of each that has one, and so on; as places in `sample`."""
    counts = torch.bincount(sample)
    from_end = torch.cumsum(counts, 0)[sample] - 1 - torch.arange(len(sample), device=sample.device)
    return [torch.nonzero(from_end == n).squeeze(1) for n in range(int(counts.max()) if len(counts) else 0)]
