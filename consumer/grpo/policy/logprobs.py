"""Log-probabilities of the sampled tokens under a model, for a packed micro-batch."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from consumer.grpo.models.device_choices import VARLEN
from consumer.grpo.models.varlen_attention import sample_borders
from consumer.grpo.policy.micro_batch import MicroBatch
from consumer.grpo.policy.routing_replay import RoutingReplay
from consumer.grpo.policy.vocabulary_projection import (
    LogitTransform,
    SampledFrom,
    TokenLogprobs,
    project,
)


class TargetLogits(nn.Module):
    """Computes log-probability and entropy where a position predicts a response token.

    One module that FSDP can shard. `replay`, if set, sets the experts of the model's gates.
    `transform`: what the model applies to logits; `check_logprobs` finds it. `fp32_logits`,
    `collision`: see `project`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.transform = LogitTransform()
        self.fp32_logits = False
        self.collision = False
        self.replay: RoutingReplay | None = None
        self.is_varlen = model.config._attn_implementation in VARLEN
        self._takes_positions = _takes_positions(model.base_model)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logit_index: Tensor,
        targets: Tensor,
        experts: Tensor | None = None,
        others: Tensor | None = None,
        sampled_from: SampledFrom | None = None,
        *,
        temperature: float = 1.0,
        entropy_gradient: bool = True,
    ) -> TokenLogprobs:
        """Return the log-probability of each target and the entropy of its distribution.

        `input_ids`, `position_ids`: int64[R, W]. `logit_index`: int64[N] of flat slots. `targets`:
        int64[N]. `experts`: see `RoutingReplay.set_experts`. `others`, `sampled_from`: see
        `project`. Only N positions are projected onto the vocabulary: prompts cost no logits.
        """
        if self.replay:
            self.replay.set_experts(experts)
        states = self._states(input_ids, position_ids).flatten(0, 1).index_select(0, logit_index)
        return project(
            states,
            self.model.get_output_embeddings(),
            targets,
            replace(self.transform, temperature=temperature),
            fp32_logits=self.fp32_logits,
            collision=self.collision,
            entropy_gradient=entropy_gradient,
            sampled_from=sampled_from,
            others=others,
        )

    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden states before the vocabulary projection, [R, W, width]."""
        return self._states(input_ids, position_ids)

    def own_logits(self, input_ids: Tensor) -> Tensor:
        """Return what the model's own forward pass returns, [R, W, vocabulary]."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    def _states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        # no attention mask: only then does transformers find sample borders in the positions
        places: dict[str, Any] = {"position_ids": position_ids} if self._takes_positions else {}
        if self.is_varlen:
            places |= sample_borders(position_ids)
        hidden: Tensor = self.model.base_model(
            input_ids=input_ids, use_cache=False, **places
        ).last_hidden_state
        return hidden


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def token_logprobs(
    policy: TargetLogits,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    bf16: bool = False,
    entropy_gradient: bool = True,
) -> TokenLogprobs:
    """Return the log-probability of each target and the entropy of its distribution.

    `temperature` divides the logits. Without `entropy_gradient` the entropy carries no gradient,
    which saves time in the backward pass. `others` are those of `batch.other_ids()`.
    """
    with torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16, enabled=bf16):
        scores: TokenLogprobs = policy(
            batch.input_ids,
            batch.position_ids,
            batch.logit_index,
            batch.targets,
            batch.recorded.get("routed_experts"),
            batch.other_ids(),
            batch.recorded.get("sampling_mask"),
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )
    return scores
