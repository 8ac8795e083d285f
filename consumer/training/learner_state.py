"""The learner's state as named tensors, so that safetensors can hold it: no pickle anywhere.

    model/<parameter>            float32, the master weights
    optimizer/<slot>/<parameter> AdamW's step, exp_avg, exp_avg_sq
    rng/cpu, rng/cuda            torch's random generators, uint8
    step                         int64, optimizer steps done
    skipped                      int64, the newest of them that were skipped (of a learner)
    adapter/base, adapter/alpha  of a LoRA adapter, which checks them itself (adapter.py)

With sharded weights, the state of a rank holds its shards: only the same number of ranks can
resume.

Invariant: after `restore` of what `capture` returned, a learner continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from buffer.errors import ModelError
from consumer.training.sharding import local_part, shard_like

SLOTS = ("step", "exp_avg", "exp_avg_sq")


def capture(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU, which further training does not change."""
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
    """Load `state` into the parameters and the optimizer; return its step.

    Raises ModelError, and changes nothing, where the state belongs to another model.
    """
    _check(state, parameters)
    for name, parameter in parameters.items():
        local_part(parameter).copy_(state[f"model/{name}"])
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
    expected = {
        f"model/{name}": tuple(local_part(parameter).shape)
        for name, parameter in parameters.items()
    }
    found = {name: tuple(t.shape) for name, t in state.items() if name.startswith("model/")}
    if found != expected:
        names = expected.keys() | found.keys()
        different = sorted(name for name in names if expected.get(name) != found.get(name))
        raise ModelError(
            f"the learner's state is of another model: {len(different)} tensors differ, "
            f"the first is {different[0]}",
            hint="resume with the model, the config and the number of ranks of the checkpoint",
        )
    missing = {"step", "rng/cpu"} - state.keys()
    if missing:
        raise ModelError(f"the learner's state is incomplete: it lacks {sorted(missing)}")


def _like(parameter: Tensor, slot: str, tensor: Tensor) -> Tensor:
    """Shard a moment as its parameter is sharded; the step is a number."""
    return tensor if slot == "step" else shard_like(parameter, tensor)


def _copy(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).to("cpu", copy=True).contiguous()
