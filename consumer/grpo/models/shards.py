"""Load a model folder into sharded parameters: each rank reads its own rows of each tensor.

The loader of transformers fills a sharded model without memory, so no rank holds the whole model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from buffer.errors import ModelError
from buffer.weights.safetensors_files import MODEL_LOADING
from consumer.grpo.models.model_folder import check_model_folder
from consumer.grpo.models.varlen_attention import register_varlen_attention


def empty_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Return the model of a folder without values.

    `dtype`, `attention`: as in `load_model`. `kind`: the class of transformers that creates it.
    Raises ModelError where there is no such model.
    """
    check_model_folder(path)
    register_varlen_attention()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with MODEL_LOADING, torch.device("meta"):
            model: PreTrainedModel = kind.from_config(
                config, dtype=dtype or torch.float32, attn_implementation=attention
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path}: cannot create the model: {error}", hint="[policy] model names it"
        ) from error
    return model


def load_shards(model: PreTrainedModel, path: Path) -> None:
    """Fill an empty model whose parameters are sharded with the values of its folder.

    Parameters are then on the device of their mesh, buffers on the CPU. Raises ModelError.
    """
    loader: Any = model
    config = LoadStateDictConfig(
        dtype=model.dtype,
        # of buffers; a parameter moves to the device of its mesh
        device_map={"": "cpu"},
        weight_mapping=get_model_conversion_mapping(model),
    )
    files = [str(file) for file in sorted(path.glob("[!.]*.safetensors"))]
    try:
        info, _ = loader._load_pretrained_model(model, None, files, config)
        loader._finalize_model_loading(model, config, info)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{path}: cannot load the model's shards: {error}",
            hint="copy the model again if a file is incomplete; the experts of a mixture must be "
            "enough for every rank to get some",
        ) from error
