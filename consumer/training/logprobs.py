"""Log-probabilities of the sampled tokens under a model, for a packed micro-batch.

`TargetLogits` is the part of a causal language model that training uses, as one module that FSDP
can shard. `keeps_samples_apart` tests whether samples may share a row.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from consumer.training.packing import MicroBatch
from consumer.training.routing_replay import RoutingReplay

log = logging.getLogger("rolloutmq.trainer")

FIRST = 4
SECOND = 6
"""Tokens of the two samples that `keeps_samples_apart` compares."""

TOLERANCE = 1e-4
"""Share of the largest hidden value: above rounding, far below the effect of another token."""


class TargetLogits(nn.Module):
    """Compute the logits of the positions that predict a response token, and of no other.

    `replay`, where it is set, sets the experts that the model's gates choose.

        policy = TargetLogits(load_model(model_dir))
        logits = policy(batch.input_ids, batch.position_ids, batch.logit_index)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.replay: RoutingReplay | None = None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logit_index: Tensor,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, [N, vocabulary].

        `input_ids`, `position_ids`: int64[R, W]. `logit_index`: int64[N] of flat slots. `experts`:
        see `RoutingReplay.set_experts`.

        The output head is applied to N positions, not to all R * W slots: prompts cost no logits,
        which for a large vocabulary are most of the memory.
        """
        if self.replay:
            self.replay.set_experts(experts)
        states = self._states(input_ids, position_ids).flatten(0, 1).index_select(0, logit_index)
        return cast(Tensor, self.model.get_output_embeddings()(states))

    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden states before the vocabulary projection, [R, W, width]."""
        return self._states(input_ids, position_ids)

    def _states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        # no attention mask: only then does transformers find sample borders in the positions
        hidden: Tensor = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return hidden


class TokenLogprobs(NamedTuple):
    """Hold one value per response token, float32[N] each; the entropy is in nats.

    Usage:

        logprobs, entropy = token_logprobs(policy, batch)
    """

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    target_logits: TargetLogits,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    bf16: bool = False,
    entropy_gradient: bool = True,
) -> TokenLogprobs:
    """Return the log-probability of each target and the entropy of its distribution.

    `temperature`: the logits are divided by it. Without `entropy_gradient` the backward pass keeps
    no tensor of the entropy; each of them is as large as the logits.
    """
    with torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = target_logits(
            batch.input_ids, batch.position_ids, batch.logit_index, batch.experts
        )
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = distribution.gather(1, batch.targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(-1)
    return TokenLogprobs(logprobs, entropy)


@torch.no_grad()
def keeps_samples_apart(policy: TargetLogits) -> bool:
    """Return whether the second sample of a row is independent of the tokens of the first.

    This is tested, not derived from the architecture: a leak between samples would go unnoticed.
    transformers finds the borders where positions start again and no mask is given. Linear
    attention (Qwen3-Next, Mamba) carries its state across them, and some older models (OPT, Bloom)
    ignore positions in their mask.
    """
    was_training = policy.model.training
    policy.eval()
    hidden = _hidden(policy, first_id=0)
    other = _hidden(policy, first_id=1)
    policy.train(was_training)
    is_apart = bool((hidden - other).abs().max() <= TOLERANCE * hidden.abs().max())
    if not is_apart:
        log.warning(
            "attention of %s crosses samples that share a row: each sample gets a row of its own",
            type(policy.model).__name__,
        )
    return is_apart


def _hidden(policy: TargetLogits, first_id: int) -> Tensor:
    """Return the hidden states of the second sample, float32[SECOND, width].

    All tokens of the first sample are `first_id`.
    """
    ids = torch.cat([torch.full((FIRST,), first_id), torch.arange(SECOND)])[None]
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    device = policy.model.device
    return policy.hidden(ids.to(device), positions.to(device))[0, FIRST:].float()
