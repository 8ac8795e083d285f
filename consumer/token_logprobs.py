"""Log-probabilities of the sampled tokens under a model, for a packed micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from consumer.packing import MicroBatch
from consumer.target_logits import TargetLogits


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
