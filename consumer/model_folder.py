"""Hugging Face model folders: saved, and loaded with errors that name the cause."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from buffer.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOADING = threading.Lock()
"""transformers makes models under switches of the whole process: of two threads that load, one may be left with a model
without values (seen: "Cannot copy out of meta tensor")."""

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "vocab*",
    "merges*",
)


def check_model_folder(path: Path) -> None:
    """ModelError unless `path` holds a Hugging Face model with safetensors weights."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model folder: it has no config.json", hint="see [model] path")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors weights", hint="convert the model to safetensors")


def load_model(path: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, with torch's attention; float32 unless said."""
    import torch
    from transformers import AutoModelForCausalLM

    check_model_folder(path)
    _hush()
    try:
        with _LOADING:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype or torch.float32, attn_implementation="sdpa", local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot load the model: {error}") from error
    return model


def save_model(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write config.json and safetensors weights into an existing folder; rounded to `dtype` where one is given."""
    _hush()
    if dtype is None:
        model.save_pretrained(folder)
        return
    rounded: dict[int, torch.Tensor] = {}  # tied weights stay tied: one copy per storage
    state = model.state_dict()
    model.save_pretrained(
        folder, state_dict={n: rounded.setdefault(t.data_ptr(), t.to("cpu", dtype)) for n, t in state.items()}
    )
    file = folder / "config.json"
    config = orjson.loads(file.read_bytes()) | {"dtype": str(dtype).removeprefix("torch.")}
    file.write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer of a model folder into another one; what is there already stays."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copy(file, folder / file.name)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. ModelError where there is none, or it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: cannot load the tokenizer: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{path}: the tokenizer has no chat template", hint="prompts are chat messages")
    return tokenizer


def _hush() -> None:
    # transformers draws a progress bar per load and save, over whatever the terminal shows.
    from transformers.utils import logging

    logging.disable_progress_bar()
