"""Weights in shards over ranks (FSDP2): gathered around each forward and backward pass, a layer at a time.

A shard is a rank's part of a tensor's first dimension. Published weights are written without any rank ever holding the
whole model: each tensor is gathered on all ranks, one after the other, and kept by the one that writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from consumer.ranks import Ranks
from consumer.shares import balanced_shares
from consumer.target_logits import TargetLogits


def shard(policy: TargetLogits, device: torch.device) -> TargetLogits:
    """Shard a model over all ranks of the default process group: each decoder layer for itself, then what is left."""
    import torch.distributed as dist

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    return policy


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; itself where it is not sharded. All ranks must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_as(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of something that is sharded as `parameter` is; itself where that is not sharded."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def write_weights(
    parameters: Mapping[str, Tensor], folder: Path, ranks: Ranks, *, dtype: torch.dtype | None = None
) -> None:
    """safetensors files as Hugging Face and vLLM read them, one per rank, and from rank 0 their index.

    Tied weights are there once. A rank holds its share of the model, and for a moment one tensor more.
    """
    names = sorted(parameters)
    kind = dtype or torch.float32
    shares = balanced_shares([math.prod(parameters[name].shape) for name in names], ranks.size)
    files = [f"model-{rank + 1:05d}-of-{ranks.size:05d}.safetensors" for rank in range(ranks.size)]
    owner = {names[place]: rank for rank, share in enumerate(shares) for place in share}
    own: dict[str, Tensor] = {}
    for name in names:
        full = whole(parameters[name].detach())
        if owner[name] == ranks.rank:
            own[name] = full.to("cpu", kind, copy=True).contiguous()
    save_file(own, folder / files[ranks.rank], metadata={"format": "pt"})
    if ranks.rank == 0:
        size = sum(math.prod(parameters[name].shape) for name in names) * kind.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": {name: files[owner[name]] for name in names}}
        (folder / "model.safetensors.index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
