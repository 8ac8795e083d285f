"""The example of TRL without a GPU: its flash attention is replaced by torch's, row by row."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing

from examples import trl_async_grpo


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Return what `flash_attn_varlen_func` does: each segment attends to the end of its path."""
    assert causal
    assert window_size == (-1, -1)
    segments = []
    of_query = pairwise(starts_q.tolist())
    of_path = pairwise(starts_k.tolist())
    for (first_q, last_q), (first_k, last_k) in zip(of_query, of_path, strict=True):
        length = last_q - first_q
        path = last_k - first_k
        out = scaled_dot_product_attention(
            query[first_q:last_q].transpose(0, 1),
            key[first_k:last_k].transpose(0, 1),
            value[first_k:last_k].transpose(0, 1),
            attn_mask=torch.ones(length, path, dtype=torch.bool).tril(path - length),
            scale=softmax_scale,
            enable_gqa=True,
        )
        segments.append(out.transpose(0, 1))
    return torch.cat(segments)


def train(*arguments: Any, **options: Any) -> None:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    # it asks CUDA for the name of the device
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    trl_async_grpo.train(*arguments, **options)
