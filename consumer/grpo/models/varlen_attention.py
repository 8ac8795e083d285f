"""Variable-length attention of torch, as an attention of transformers: no mask for packed rows.

Needs a CUDA device, bfloat16 or float16, and torch 2.11 or later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

TORCH_VARLEN = "torch_varlen"


def register_varlen_attention() -> None:
    """Make `attn_implementation="torch_varlen"` known to transformers; may be repeated."""
    AttentionInterface.register(TORCH_VARLEN, varlen_attention)
    AttentionMaskInterface.register(TORCH_VARLEN, flash_attention_mask)


def sample_borders(position_ids: Tensor) -> dict[str, Any]:
    """Return the arguments from which variable-length attentions read where samples start.

    `position_ids`: int64[R, W], 0 where a sample starts. The names are those of transformers.
    """
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero().flatten()
    borders = torch.cat([starts, starts.new_tensor([len(flat)])]).to(torch.int32)
    longest = int(borders.diff().max())
    return {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of each sample to itself, [R, W, heads, width], and no weights.

    `query`: [R, heads, W, width]; `key`, `value`: the same with a divisor of the heads. Without
    borders each row is one sample.
    """
    rows, heads, width, _ = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * width
        max_length_q = width
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else value.dtype
    queries, keys, values = (
        tensor.transpose(1, 2).flatten(0, 1).to(dtype) for tensor in (query, key, value)
    )
    mixed = varlen.varlen_attn(
        queries,
        keys,
        values,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        # tokens before a token that it attends to, and none behind it
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(rows, width, heads, -1), None
