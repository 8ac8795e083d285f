"""What "auto" means for a model on a device: the precision of its forward pass, and its attention.

device  bf16   attention, the first that the model and the machine have
cuda    true   flash_attention_3, flash_attention_2, torch_varlen, sdpa, flex_attention, eager
cuda    false  sdpa, flex_attention, eager
cpu     false  sdpa, eager

The first three need no mask; sdpa gets one of [rows, width, width] for rows of several samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from buffer.errors import ConfigError, ModelError
from consumer.config.learner import LearnerConfig
from consumer.grpo.models.model_folder import check_model_folder
from consumer.grpo.models.varlen_attention import TORCH_VARLEN

ORDER = ("flash_attention_3", "flash_attention_2", TORCH_VARLEN, "sdpa", "flex_attention", "eager")
VARLEN = ORDER[:3]  # read the borders of samples (`sample_borders`); need bf16 and CUDA

PACKAGES: dict[str, tuple[str, Callable[[], bool]]] = {
    "flash_attention_3": ("flash-attn-3", lambda: bool(is_flash_attn_3_available())),
    "flash_attention_2": ("flash-attn", lambda: bool(is_flash_attn_2_available())),
}


def choose_bf16(config: LearnerConfig, device: torch.device) -> bool:
    """Return whether forward passes run in bfloat16; "auto": on CUDA from Ampere on."""
    if config.bf16 != "auto":
        return config.bf16
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_attention(
    config: LearnerConfig, model_dir: Path, device: torch.device, *, bf16: bool
) -> str:
    """Return the attention for the model of a folder, by the name that transformers has for it.

    Raises ConfigError where the one of the config cannot run, ModelError for no usable model.
    """
    place = ModelOnDevice(*_architecture(model_dir), device.type, bf16)
    if config.attn_implementation == "auto":
        return next(name for name in ORDER if place.obstacle(name) is None)
    if problem := place.obstacle(config.attn_implementation):
        raise ConfigError(
            f"[learner] attn_implementation = {config.attn_implementation}: {problem}",
            hint='attn_implementation = "auto" chooses one that can run',
        )
    return config.attn_implementation


@dataclass(frozen=True, slots=True)
class ModelOnDevice:
    model: Any
    config: Any
    device: str
    bf16: bool

    def obstacle(self, name: str) -> str | None:
        """Return why an attention cannot run here; None where it can."""
        if name == "eager":
            return None
        if name == "sdpa":
            return None if self.model._supports_sdpa else f"{self.model.__name__} does not allow it"
        if self.device != "cuda":
            return "it needs a CUDA device"
        if name == "flex_attention":
            is_known = self.model._supports_flex_attn
            return None if is_known else f"{self.model.__name__} does not allow it"
        return self._varlen_obstacle(name)

    def _varlen_obstacle(self, name: str) -> str | None:
        if not self.bf16:
            return "it needs bf16"
        # sdpa lacks the attention sinks of gpt-oss, and so do these kernels
        if not (self.model._supports_flash_attn and self.model._supports_sdpa):
            return f"{self.model.__name__} does not allow it"
        if name in PACKAGES:
            package, is_installed = PACKAGES[name]
            return None if is_installed() else f"{package} is not installed"
        unknown = ("attn_logit_softcapping", "kv_lora_rank", "attention_dropout")
        used = [key for key in unknown if getattr(self.config, key, None)]
        return f"it has no {used[0]}, which the model's config sets" if used else None


def _architecture(model_dir: Path) -> tuple[Any, Any]:
    check_model_folder(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config.get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{model_dir}: cannot load the model: {error}", hint="[policy] model names it"
        ) from error
