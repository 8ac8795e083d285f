"""Models with the shapes of real ones and random weights, written without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from buffer.weights.new_folder import new_folder
from consumer.grpo.models.model_folder import save_model
from rolloutmq.config.small_model import TinyModelConfig
from rolloutmq.extensions.demo.tiny_model import architecture, build_tokenizer

VOCABULARY = 151_936
CONTEXT = 2_048


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int) -> TinyModelConfig:
    return TinyModelConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab_size=VOCABULARY,
        max_positions=CONTEXT,
        init_std=0.02,
    )


SHAPES = {
    "tiny": TinyModelConfig(max_positions=512),
    "0.6B": _qwen3(1024, 28, 16, 3072),
    "1.7B": _qwen3(2048, 28, 16, 6144),
    "4B": _qwen3(2560, 36, 32, 9728),
}
"""Qwen3's dense models; "tiny" is for a rehearsal without a GPU."""


def build_model(folder: Path, shape: str) -> None:
    """Write a model of this shape into `folder`, in bfloat16 where there is a GPU to make it on.

    Raises ModelError where `folder` exists.
    """
    spec = SHAPES[shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = build_tokenizer(spec)
    torch.manual_seed(1)
    with torch.device(device):
        model = Qwen3ForCausalLM(architecture(spec, tokenizer))
    if device == "cuda":
        model = model.to(torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as unfinished:
        save_model(model, unfinished)
        tokenizer.save_pretrained(unfinished)
