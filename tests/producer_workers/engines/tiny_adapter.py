"""Random LoRA adapters for the tiny models, each with the model that it makes of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import torch
from safetensors.torch import load_file, save_file

RANK = 4
ALPHA = 8


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write a random adapter of all projections of q and v.

    Beside it, "merged" is the model with the adapter added.
    """
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    adapter: dict[str, torch.Tensor] = {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        out, into = weights[name].shape
        low, high = (
            0.3 * torch.randn(shape, generator=draw) for shape in ((RANK, into), (out, RANK))
        )
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{stem}.lora_A.weight": low, f"{stem}.lora_B.weight": high}
        weights[name] = weights[name] + ALPHA / RANK * high @ low
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
        "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_bytes(
        orjson.dumps(config | {"target_modules": ["q_proj", "v_proj"]})
    )
    shutil.copytree(model, folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder
