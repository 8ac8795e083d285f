"""Whether a model keeps samples of one row apart.

This is tested, not derived from the architecture: a leak between samples would go unnoticed.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

log = logging.getLogger("rolloutmq.trainer")

FIRST = 4
SECOND = 6
"""Tokens of the two samples of the test."""

TOLERANCE = 1e-4
"""Share of the largest hidden value: above rounding, far below the effect of another token."""


@torch.no_grad()
def keeps_samples_apart(model: PreTrainedModel) -> bool:
    """Return whether the second sample of a row is independent of the tokens of the first.

    transformers finds the borders where positions start again and no mask is given. Linear
    attention (Qwen3-Next, Mamba) carries its state across them, and some older models (OPT, Bloom)
    ignore positions in their mask.
    """
    was_training = model.training
    model.eval()
    hidden = _hidden(model, first_id=0)
    other = _hidden(model, first_id=1)
    model.train(was_training)
    is_apart = bool((hidden - other).abs().max() <= TOLERANCE * hidden.abs().max())
    if not is_apart:
        log.warning(
            "attention of %s crosses samples that share a row: each sample gets a row of its own",
            type(model).__name__,
        )
    return is_apart


def _hidden(model: PreTrainedModel, first_id: int) -> torch.Tensor:
    """Return the hidden states of the second sample, float32[SECOND, width].

    All tokens of the first sample are `first_id`.
    """
    ids = torch.cat([torch.full((FIRST,), first_id), torch.arange(SECOND)])[None]
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    hidden: torch.Tensor = model.base_model(
        input_ids=ids.to(model.device), position_ids=positions.to(model.device), use_cache=False
    ).last_hidden_state
    return hidden[0, FIRST:].float()
