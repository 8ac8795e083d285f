"""A LoRA adapter's folder, as PEFT and vLLM have it: what trainer and worker must call alike."""

from __future__ import annotations

from pathlib import Path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

STEM = "base_model.model."
"""What PEFT puts before the name of a layer."""

BASE = "rolloutmq_base"
"""In the metadata of its tensors: the checksum of the model that it is for (tensor_files.py)."""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()
