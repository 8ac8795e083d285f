"""Hugging Face model folders: saved, and loaded with errors that name the problem."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.errors import ModelError
from buffer.weights.safetensors_files import MODEL_LOADING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json", "vocab*",
    "merges*",
)  # fmt: skip


def check_model_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} is not a model folder: it has no config.json", hint="[policy] model names it"
        )
    if not any(path.glob("[!.]*.safetensors")):
        raise ModelError(
            f"{path} has no *.safetensors weights", hint="convert the model to safetensors"
        )


def load_model(
    path: Path, *, dtype: torch.dtype | None = None, attention: str | None = None
) -> PreTrainedModel:
    """Return the causal language model of a folder, on the CPU.

    `dtype`: default float32. `attention`: see `choose_attention`; default: sdpa, or eager for a
    model that does not allow it. Raises ModelError where it cannot be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from consumer.grpo.models.varlen_attention import register_varlen_attention

    check_model_folder(path)
    register_varlen_attention()
    _disable_progress_bars()
    try:
        with MODEL_LOADING:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype or torch.float32,
                attn_implementation=attention,
                local_files_only=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{path}: cannot load the model: {error}",
            hint="[policy] model names it; copy the model again if a file is incomplete",
        ) from error
    return model


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json and safetensors weights into an existing folder."""
    _disable_progress_bars()
    model.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files of a model folder into another one; existing files stay."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder.

    Raises ModelError if it, or its chat template, is missing.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: cannot load the tokenizer: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"{path}: the tokenizer has no chat template",
            hint="add chat_template.jinja: prompts are chat messages",
        )
    return tokenizer


def _disable_progress_bars() -> None:
    # transformers draws one per load and save, over the output of the terminal
    from transformers.utils import logging

    logging.disable_progress_bar()
