"""Weights as `save_pretrained` writes them, by any number of ranks, none of which holds all.

Parameters inside transformers differ from those of a model folder: the experts of a mixture are
fused, and some are renamed. Each layer is gathered on all ranks, one after the other, and kept,
under the names of the folder, by the rank that writes it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from consumer.ranks import Ranks, balanced_shares
from consumer.weights.sharding import gather

INDEX = "model.safetensors.index.json"


def write_weights(
    model: PreTrainedModel, folder: Path, ranks: Ranks, *, dtype: torch.dtype | None = None
) -> None:
    """Write config.json and safetensors weights into an existing folder; all ranks must call it.

    `dtype`: round the weights to it; default: write them as they are. Tied weights are written
    once. A rank needs host memory for its share of the model and one layer.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = {name: value for name, value in model.state_dict().items() if name not in tied}
    groups = _groups(tensors)
    sizes = [sum(tensors[name].numel() for name in group) for group in groups]
    own: dict[str, Tensor] = {}
    share = set(balanced_shares(sizes, ranks.size)[ranks.rank])
    for index, group in enumerate(groups):
        whole = {name: _gathered(tensors[name], dtype, index in share) for name in group}
        if index in share:
            own |= revert_weight_conversion(model, whole)
    own = {name: _alone(tensor) for name, tensor in own.items()}
    file = _file_name(ranks.rank, ranks.size)
    save_file(own, folder / file, metadata={"format": "pt"})
    _write_index(own, folder, ranks)
    if ranks.rank == 0:
        _write_config(model, folder, dtype)


def _groups(names: Mapping[str, Tensor]) -> list[list[str]]:
    """Divide names into those of a layer each, which are converted together, and single ones."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        numbers = [position for position, part in enumerate(parts) if part.isdigit()]
        layer = parts[: numbers[0] + 1] if numbers else parts
        groups.setdefault(".".join(layer), []).append(name)
    return list(groups.values())


def _gathered(tensor: Tensor, dtype: torch.dtype | None, is_own: bool) -> Tensor:
    """Return the whole tensor in host memory; only its shape where another rank writes it."""
    detached = tensor.detach()
    rounded = detached.to(dtype) if dtype and detached.is_floating_point() else detached
    whole = gather(rounded)
    return whole.to("cpu" if is_own else "meta")


def _alone(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with memory of its own, as safetensors ask."""
    contiguous = tensor.contiguous()
    is_part = contiguous.untyped_storage().nbytes() != contiguous.nbytes
    return contiguous.clone() if is_part else contiguous


def _file_name(rank: int, size: int) -> str:
    return "model.safetensors" if size == 1 else f"model-{rank + 1:05d}-of-{size:05d}.safetensors"


def _write_index(own: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    if ranks.size == 1:
        return
    parts = ranks.gather([list(own), sum(tensor.nbytes for tensor in own.values())])
    if ranks.rank == 0:
        index = {
            "metadata": {"total_size": sum(size for _, size in parts)},
            "weight_map": {
                name: _file_name(rank, ranks.size)
                for rank, (names, _) in enumerate(parts)
                for name in names
            },
        }
        (folder / INDEX).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


def _write_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
