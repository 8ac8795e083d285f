"""Sample a token in vLLM's order: penalties, temperature, min-p, top-k, top-p.

Invariant: the logprob is that of the distribution from which the token was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from buffer.wire.sampling import SampleParams


class SampledToken(NamedTuple):
    """A token id, its natural log probability, and the ids that it was sampled from (None: all)."""

    token: int
    logprob: float
    kept: Tensor | None = None


def sample(
    logits: Tensor,
    params: SampleParams,
    prompt: Sequence[int],
    response: Sequence[int],
    stop_ids: Collection[int],
    generator: torch.Generator,
) -> SampledToken:
    """Sample one of float[V]; none of `stop_ids` before `min_tokens` others."""
    logits = _penalize(logits.float(), params, prompt, response)
    if len(response) < params.min_tokens:
        logits[list(stop_ids)] = -torch.inf
    if params.temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        token = int(logprobs.argmax())
        return SampledToken(token, float(logprobs[token]))
    logprobs = torch.log_softmax(_cut(logits / params.temperature, params), -1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    kept = logprobs.isfinite()
    is_whole = bool(kept.all()) and not params.always_cuts()
    return SampledToken(token, float(logprobs[token]), None if is_whole else kept.nonzero()[:, 0])


def _penalize(
    logits: Tensor, params: SampleParams, prompt: Sequence[int], response: Sequence[int]
) -> Tensor:
    """Apply the penalties. Only repetition counts the prompt."""
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *response}), device=logits.device)
        worth = logits[seen]
        logits[seen] = torch.where(
            worth > 0, worth / params.repetition_penalty, worth * params.repetition_penalty
        )
    if response and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(response, device=logits.device), minlength=len(logits))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return logits


def _cut(logits: Tensor, params: SampleParams) -> Tensor:
    """Keep the `top_k` likeliest tokens, of these the fewest that sum to `top_p`.

    And, of all tokens, those at least `min_p` times as likely as the likeliest.
    """
    if 0 < params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.min_p:
        likeliest = logits.max() + math.log(params.min_p)
        logits = logits.masked_fill(logits < likeliest, -torch.inf)
    if params.top_p < 1.0:
        ordered, indices = torch.softmax(logits, -1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        logits = logits.index_fill(0, indices[beyond], -torch.inf)
    return logits
