"""Whether samples of one row stay apart in a model: tried, not looked up, since a leak is silent."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

log = logging.getLogger("rolloutmq.trainer")

FIRST, SECOND = 4, 6
"""Tokens of the two samples of the trial."""
TOLERANCE = 1e-4
"""Of the largest hidden value: above what the order of sums changes, far below what another token does."""


@torch.no_grad()
def keeps_samples_apart(model: PreTrainedModel) -> bool:
    """Whether the second sample of a row does not notice what stands in the first.

    transformers finds the borders where positions start again and no mask is given. Linear attention (Qwen3-Next,
    Mamba) carries its state over them, and some older models (OPT, Bloom) do not look.
    """
    was_training = model.training
    model.eval()
    one, other = _hidden(model, 0), _hidden(model, 1)
    model.train(was_training)
    apart = bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
    if not apart:
        name = type(model).__name__
        log.warning("attention of %s crosses samples that share a row: each gets a row of its own", name)
    return apart


def _hidden(model: PreTrainedModel, first_id: int) -> torch.Tensor:
    """Of the second sample, float[SECOND, width]; the first one consists of `first_id`."""
    ids = torch.cat([torch.full((FIRST,), first_id), torch.arange(SECOND)])[None]
    places = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    told: torch.Tensor = model.base_model(
        input_ids=ids.to(model.device), position_ids=places.to(model.device), use_cache=False
    ).last_hidden_state
    return told[0, FIRST:].float()
