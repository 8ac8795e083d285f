"""What training needs of a causal language model, as one module, so that FSDP gathers its weights around it."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from consumer.routing_replay import RoutingReplay


class TargetLogits(nn.Module):
    """Logits of the positions that predict a response token, and of no other."""

    def __init__(self, model: PreTrainedModel, replay: RoutingReplay | None = None) -> None:
        super().__init__()
        self.model, self._replay = model, replay

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logit_index: Tensor, experts: Tensor | None = None
    ) -> Tensor:
        """`input_ids`, `position_ids` int64[R, W], `logit_index` int64[N] of flat slots: [N, vocabulary].

        The output head is applied to N positions, not to all R * W slots: prompts cost no logits, which for a large
        vocabulary is most of the memory. `experts`: see `RoutingReplay.tell`.
        """
        if self._replay:
            self._replay.tell(experts)
        # No attention mask on purpose: only then does transformers read the borders from the positions.
        hidden = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return cast(Tensor, self.model.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, logit_index)))
