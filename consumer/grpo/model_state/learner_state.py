"""The learner's state as named tensors, so that safetensors can hold it: no pickle anywhere.

model/<parameter>            float32, the master weights
optimizer/<slot>/<parameter> AdamW's step and moments (`STATES` of optimizers.py)
rng/cpu, rng/cuda            torch's random generators, uint8
step                         int64, optimizer steps done
skipped                      int64, the newest of them that were skipped (of a learner)
adapter/base, adapter/alpha  of a LoRA adapter, which checks them itself (lora.py)

With sharded weights, a rank's state holds its rows of parameters and moments.

Invariant: after `load_state_tensors` of what `state_tensors` returned, training continues bit for
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from buffer.errors import ModelError
from consumer.config.learner import OptimizerKind
from consumer.grpo.model_state.optimizers import SHARDED, STATES, kind_of
from consumer.grpo.model_state.saved_state import Rows
from consumer.grpo.model_state.sharding import local_part, rows_of, shard_like


class TrainedModel:
    """Parameters with their `optimizer` on a `device`; `step` counts optimizer steps.

    `modules`: all that computes on the device. `prefix`: what the names of its tensors in the state
    begin with.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        modules: Sequence[nn.Module] = (),
        prefix: str = "",
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.device = device
        self.modules = [*modules]
        self.prefix = prefix
        self.step = 0
        self.is_asleep = False

    def sleep(self) -> None:
        """Free the device: what sleeps can be saved, but not trained."""
        self.optimizer.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_asleep = True

    def wake(self) -> None:
        self._move(self.device)
        self.is_asleep = False

    def _move(self, device: torch.device) -> None:
        for module in self.modules:
            # in place: the optimizer holds the same parameter objects
            module.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return contiguous copies on the CPU, which further training does not change."""
        state = {f"model/{name}": _copy(tensor) for name, tensor in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for slot, value in self.optimizer.state[parameter].items():
                state[f"optimizer/{slot}/{name}"] = _copy(torch.as_tensor(value))
        state["rng/cpu"] = torch.get_rng_state().clone()
        if self.device.type == "cuda":
            state["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        state["step"] = torch.tensor(self.step)
        return {f"{self.prefix}{name}": tensor for name, tensor in state.items()}

    def shard_rows(self) -> dict[str, Rows]:
        """Return which rows of its sharded tensors this rank has, by their names in the state."""
        sharded = {
            name: rows_of(parameter)
            for name, parameter in self.parameters.items()
            if isinstance(parameter, DTensor)
        }
        groups = ["model", *(f"optimizer/{slot}" for slot in SHARDED)]
        return {
            f"{self.prefix}{group}/{name}": rows
            for group in groups
            for name, rows in sharded.items()
        }

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors()`.

        Raises ModelError, and changes nothing, for the state of another model or optimizer.
        """
        start, kind = self.prefix, kind_of(self.optimizer)
        self._check(state, kind)
        for name, parameter in self.parameters.items():
            local_part(parameter).copy_(state[f"{start}model/{name}"])
            names = {slot: f"{start}optimizer/{slot}/{name}" for slot in STATES[kind]}
            self.optimizer.state[parameter] = {
                slot: shard_like(parameter, state[key].to(parameter.device, copy=True))
                for slot, key in names.items()
                if key in state and slot != "step"
            }
            # bitsandbytes counts in Python
            if (step := names["step"]) in state:
                count = state[step].to(parameter.device, copy=True)
                self.optimizer.state[parameter]["step"] = count if kind == "adamw" else int(count)
        torch.set_rng_state(state[f"{start}rng/cpu"])
        if self.device.type == "cuda" and f"{start}rng/cuda" in state:
            torch.cuda.set_rng_state(state[f"{start}rng/cuda"], self.device)
        self.step = int(state[f"{start}step"])

    def _check(self, state: Mapping[str, Tensor], kind: OptimizerKind) -> None:
        start = f"{self.prefix}model/"
        expected = {
            f"{start}{name}": tuple(local_part(parameter).shape)
            for name, parameter in self.parameters.items()
        }
        # one at a time: a state may read its tensors from files
        found = {name: tuple(state[name].shape) for name in state if name.startswith(start)}
        if found != expected:
            all_names = expected.keys() | found.keys()
            different = sorted(name for name in all_names if expected.get(name) != found.get(name))
            raise ModelError(
                f"the learner's state is of another model: {len(different)} tensors differ, "
                f"the first is {different[0]}",
                hint="resume with the model and the config of the checkpoint",
            )
        missing = {f"{self.prefix}step", f"{self.prefix}rng/cpu"} - state.keys()
        if missing:
            raise ModelError(f"the learner's state is incomplete: it lacks {sorted(missing)}")
        start = f"{self.prefix}optimizer/"
        slots = {name.removeprefix(start).split("/")[0] for name in state if name.startswith(start)}
        for other, names in STATES.items():
            if slots - set(STATES[kind]) and slots <= set(names):
                raise ModelError(
                    f"the checkpoint holds the state of [learner] optimizer = {other}, not of "
                    f"{kind}: they cannot be converted",
                    hint=f"optimizer = {other} continues this run; another one needs a new run",
                )


def _copy(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).to("cpu", copy=True).contiguous()
