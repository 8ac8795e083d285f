"""Weights sharded over ranks by the first dimension: FSDP2 gathers a layer before it computes.

The loader of transformers fills a sharded model without memory: each rank reads its own rows of
each tensor, so none holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from buffer.errors import ModelError
from buffer.weights.safetensors_files import MODEL_LOADING
from consumer.config.learner import ShardingConfig
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.models.model_folder import check_model_folder
from consumer.grpo.models.varlen_attention import register_varlen_attention
from consumer.handle.ranks import Ranks


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


def shard(
    root: nn.Module,
    model: PreTrainedModel,
    device: torch.device,
    config: ShardingConfig,
    *,
    bf16: bool = False,
    methods: Sequence[str] = (),
) -> None:
    """Shard the modules of `root`, which contains `model`, over all ranks.

    Each layer that transformers does not split is a unit; `root` is one for everything else.
    `bf16`: gather and compute in bfloat16, reduce gradients in float32. `methods`: those of `root`,
    besides `forward`, that compute with its weights.
    """
    kind = torch.bfloat16 if bf16 else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32),
    }
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    # inner ones first, as FSDP asks
    for layer in reversed(layers):
        fully_shard(layer, **options)
    fully_shard(root, **options)
    for method in methods:
        register_fsdp_forward_method(root, method)


def place(root: nn.Module, device: torch.device, config: ShardingConfig) -> None:
    """Move the buffers to the device, and with `cpu_offload` the parameters to the CPU."""
    if config.cpu_offload:
        root.to("cpu")
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def set_gradient_sync(root: nn.Module, *, is_last: bool, config: ShardingConfig) -> None:
    """Set whether the next backward pass, the last of its step or not, reduces the gradients."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(is_last or config.reduce_each_micro_batch)
        root.set_is_last_backward(is_last)


def average_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Average the gradients of parameters that every rank holds whole, as FSDP does with shards."""
    gradients = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and not isinstance(parameter, DTensor)
    ]
    if ranks.size == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = torch.split(flat / ranks.size, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; an unsharded one unchanged. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; an unsharded tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: Tensor) -> Rows:
    """Return which rows of a sharded tensor this rank has: FSDP divides them as `chunk` does."""
    assert isinstance(tensor, DTensor)
    total = tensor.shape[0]
    each = -(-total // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * each, total)
    return Rows(first, tensor.to_local().shape[0], total)


def shard_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return the tensor with this rank's `part`, sharded as `parameter` is; or `part` itself."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
