"""The learner's state as named tensors, so that safetensors can hold it: no pickle anywhere.

model/<parameter>            float32, the master weights
optimizer/<slot>/<parameter> AdamW's step and moments (`STATES` of optimizers.py)
rng/cpu, rng/cuda            torch's random generators, uint8
step                         int64, optimizer steps done
skipped                      int64, the newest of them that were skipped (of a learner)
adapter/base, adapter/alpha  of a LoRA adapter, which checks them itself (lora.py)

With sharded weights, a rank's state holds its rows of parameters and moments.

Invariant: after `restore` of what `capture` returned, a learner continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from buffer.errors import ModelError
from consumer.grpo.model_state.optimizers import SHARDED, STATES, kind_of
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.model_state.sharding import local_part, rows_of, shard_like


def capture(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    device: torch.device,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU, which further training does not change."""
    state = {f"model/{name}": _copy(tensor) for name, tensor in parameters.items()}
    for name, parameter in parameters.items():
        for slot, value in optimizer.state[parameter].items():
            state[f"optimizer/{slot}/{name}"] = _copy(torch.as_tensor(value))
    state["rng/cpu"] = torch.get_rng_state().clone()
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    state["step"] = torch.tensor(step)
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def shard_rows(parameters: Mapping[str, Tensor], prefix: str = "") -> dict[str, Rows]:
    sharded = {
        name: rows_of(parameter)
        for name, parameter in parameters.items()
        if isinstance(parameter, DTensor)
    }
    groups = ["model", *(f"optimizer/{slot}" for slot in SHARDED)]
    return {f"{prefix}{group}/{name}": rows for group in groups for name, rows in sharded.items()}


@torch.no_grad()
def restore(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    prefix: str = "",
) -> int:
    """Load `state`; return its step.

    Raises ModelError, and changes nothing, for another model's.
    """
    _check(state, parameters, prefix)
    _check_optimizer(state, optimizer, prefix)
    kind = kind_of(optimizer)
    for name, parameter in parameters.items():
        local_part(parameter).copy_(state[f"{prefix}model/{name}"])
        names = {slot: f"{prefix}optimizer/{slot}/{name}" for slot in STATES[kind]}
        optimizer.state[parameter] = {
            slot: _like(parameter, slot, state[key].to(parameter.device, copy=True))
            if slot != "step" or kind == "adamw"
            else int(state[key])  # bitsandbytes counts in Python
            for slot, key in names.items()
            if key in state
        }
    torch.set_rng_state(state[f"{prefix}rng/cpu"])
    if device.type == "cuda" and f"{prefix}rng/cuda" in state:
        torch.cuda.set_rng_state(state[f"{prefix}rng/cuda"], device)
    return int(state[f"{prefix}step"])


def _check(state: Mapping[str, Tensor], parameters: Mapping[str, Tensor], prefix: str) -> None:
    expected = {
        f"{prefix}model/{name}": tuple(local_part(parameter).shape)
        for name, parameter in parameters.items()
    }
    names = [name for name in state if name.startswith(f"{prefix}model/")]
    found = {name: tuple(state[name].shape) for name in names}
    if found != expected:
        all_names = expected.keys() | found.keys()
        different = sorted(name for name in all_names if expected.get(name) != found.get(name))
        raise ModelError(
            f"the learner's state is of another model: {len(different)} tensors differ, "
            f"the first is {different[0]}",
            hint="resume with the model and the config of the checkpoint",
        )
    missing = {f"{prefix}step", f"{prefix}rng/cpu"} - state.keys()
    if missing:
        raise ModelError(f"the learner's state is incomplete: it lacks {sorted(missing)}")


def _check_optimizer(
    state: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, prefix: str
) -> None:
    known = STATES[kind_of(optimizer)]
    start = f"{prefix}optimizer/"
    slots = {name.removeprefix(start).split("/")[0] for name in state if name.startswith(start)}
    for kind, names in STATES.items():
        if slots - set(known) and slots <= set(names):
            raise ModelError(
                f"the checkpoint holds the state of [learner] optimizer = {kind}, not of "
                f"{kind_of(optimizer)}: they cannot be converted",
                hint=f"optimizer = {kind} continues this run; another one needs a new run",
            )


def _like(parameter: Tensor, slot: str, tensor: Tensor) -> Tensor:
    return tensor if slot == "step" else shard_like(parameter, tensor)


def _copy(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).to("cpu", copy=True).contiguous()
