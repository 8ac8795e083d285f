"""Weights sharded over ranks (FSDP2): gathered layer by layer around forward and backward passes.

A shard is a rank's part of a tensor's first dimension. Published weights are written without any
rank holding the whole model: each tensor is gathered on all ranks, one after the other, and kept by
the rank that writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from consumer.ranks import Ranks, balanced_shares
from consumer.training.logprobs import TargetLogits
from consumer.training.saved_state import Rows


def shard(policy: TargetLogits, device: torch.device) -> TargetLogits:
    """Shard a model over all ranks of the default process group; return the same module.

    Each decoder layer is a unit of its own; a last unit holds everything else.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for method in (policy.hidden, policy.own_logits):
        register_fsdp_forward_method(policy, method.__name__)
    return policy


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
    """Return the tensor of which `part` is this rank's part, sharded as `parameter` is.

    This is `part` itself where `parameter` is not sharded.
    """
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def write_weights(
    parameters: Mapping[str, Tensor],
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write one safetensors file per rank, and on rank 0 their index.

    Hugging Face and vLLM read them. `dtype`: of the written numbers; default: float32. Tied weights
    are written once. A rank holds its share of the model and temporarily one tensor more.
    """
    names = sorted(parameters)
    kind = dtype or torch.float32
    sizes = [math.prod(parameters[name].shape) for name in names]
    files = [f"model-{rank + 1:05d}-of-{ranks.size:05d}.safetensors" for rank in range(ranks.size)]
    shares = balanced_shares(sizes, ranks.size)
    writer = {names[index]: rank for rank, share in enumerate(shares) for index in share}
    own: dict[str, Tensor] = {}
    for name in names:
        full = gather(parameters[name].detach())
        if writer[name] == ranks.rank:
            own[name] = full.to("cpu", kind, copy=True).contiguous()
    save_file(own, folder / files[ranks.rank], metadata={"format": "pt"})
    if ranks.rank == 0:
        index = {
            "metadata": {"total_size": sum(sizes) * kind.itemsize},
            "weight_map": {name: files[writer[name]] for name in names},
        }
        data = orjson.dumps(index, option=orjson.OPT_INDENT_2)
        (folder / "model.safetensors.index.json").write_bytes(data)
