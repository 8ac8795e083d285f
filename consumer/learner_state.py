"""The learner's state as named tensors, so that safetensors can hold it: no pickle anywhere.

    model/<parameter>            float32, the master weights
    optimizer/<slot>/<parameter> AdamW's step, exp_avg, exp_avg_sq
    rng/cpu, rng/cuda            torch's generators, uint8
    step                         int64, optimizer steps done
    adapter/base, adapter/alpha  of a LoRA adapter, which checks them itself (adapter.py)

Of sharded weights, a rank's state is its shards: only as many ranks can go on from them.

Invariant: `restore` of what `capture` gave leaves a learner that continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from buffer.errors import ModelError
from consumer.sharding import local, sharded_as

SLOTS = ("step", "exp_avg", "exp_avg_sq")


def capture(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, step: int, device: torch.device
) -> dict[str, Tensor]:
    """Copies on the CPU, contiguous; safe to write while training goes on."""
    state = {f"model/{name}": _copy(tensor) for name, tensor in parameters.items()}
    for name, parameter in parameters.items():
        for slot, tensor in optimizer.state[parameter].items():
            state[f"optimizer/{slot}/{name}"] = _copy(tensor)
    state["rng/cpu"] = torch.get_rng_state().clone()
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state | {"step": torch.tensor(step)}


@torch.no_grad()
def restore(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> int:
    """Put `state` in place and return its step. ModelError, and nothing changed, if it is another model's."""
    _check(state, parameters)
    for name, parameter in parameters.items():
        local(parameter).copy_(state[f"model/{name}"])
        saved = {slot: state.get(f"optimizer/{slot}/{name}") for slot in SLOTS}
        optimizer.state[parameter] = {
            slot: _like(parameter, slot, tensor.to(device, copy=True))
            for slot, tensor in saved.items()
            if tensor is not None
        }
    torch.set_rng_state(state["rng/cpu"])
    if device.type == "cuda" and "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"], device)
    return int(state["step"])


def _check(state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    wanted = {f"model/{name}": tuple(local(parameter).shape) for name, parameter in parameters.items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith("model/")}
    if found != wanted:
        different = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        raise ModelError(
            f"the learner's state is of another model: {len(different)} tensors differ, first {different[0]}",
            hint="resume with the model, the config and as many ranks as the checkpoint was made with",
        )
    if missing := {"step", "rng/cpu"} - state.keys():
        raise ModelError(f"the learner's state is incomplete: it lacks {sorted(missing)}")


def _like(parameter: Tensor, slot: str, tensor: Tensor) -> Tensor:
    """A moment is sharded as its parameter is; the step is a number."""
    return tensor if slot == "step" else sharded_as(parameter, tensor)


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).to("cpu", copy=True).contiguous()
