"""Rollout routing replay (arXiv:2510.11370): train with the experts that the engine chose.

Engine and trainer choose differently between nearly equal experts, and the ratio of such a token
says nothing about the policy. Only the result of a gate's top-k is replaced: the weights of the
chosen experts are the trainer's own, with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from buffer.errors import ConfigError, WireError
from buffer.maintenance.column_files import NO_FILES, ColumnFolder
from buffer.wire.expert_gates import expert_gates, layers_of
from buffer.wire.group import RolloutGroup
from consumer.grpo.policy.column_readers import Places

Recorded = NDArray[np.int16] | str | None  # as in `RolloutState.routed_experts`


class RecordedExperts:
    """Reads experts recorded for a model with `top_k` of `experts` experts per token in each layer.

    `columns`: the folder with large recordings.
    """

    name = "routed_experts"
    mistake = (
        "no group of the batch has experts that can be replayed: the log has the reasons",
        "set [engine] routed_experts = true for the workers, or remove [learner] replay_routing",
    )

    def __init__(
        self, layers: int, top_k: int, experts: int, columns: ColumnFolder = NO_FILES
    ) -> None:
        self._shape = (layers, top_k)
        self._experts = experts
        self._columns = columns

    def problem(self, group: RolloutGroup) -> str:
        """Return why the experts of a group cannot be replayed; "" if they can."""
        rollouts = zip(group.values_of(self.name), group.lengths.tolist(), strict=True)
        for index, (recorded, length) in enumerate(rollouts):
            try:
                if length:
                    self._read(recorded, len(group.prompt_ids) + length)
            except WireError as error:
                return f"rollout {index} {error}"
        return ""

    def of_rollouts(self, values: Sequence[Recorded], places: Places) -> Tensor | None:
        """Return the experts at each slot of a micro-batch, int16[slots, layers, top_k].

        The last token of each rollout, which is never routed, and unused slots get -1. Raises
        WireError for missing or unusable experts.
        """
        if not values:
            return None
        table = np.full((places.slots, *self._shape), -1, "<i2")
        placed = zip(values, places.first.tolist(), places.totals.tolist(), strict=True)
        for recorded, start, total in placed:
            table[start : start + total - 1] = self._read(recorded, total)
        return torch.from_numpy(table).to(places.device)

    def _read(self, recorded: Recorded, total: int) -> NDArray[np.int16]:
        shape = (total - 1, *self._shape)
        if recorded is None:
            raise WireError("has no routed experts")
        experts = recorded
        if isinstance(experts, str):
            try:
                experts = self._columns.read(experts, "<i2", int(np.prod(shape)))
            except WireError as error:
                raise WireError(f"has routed experts that cannot be read: {error}") from error
        if experts.shape != shape:
            raise WireError(
                f"has routed experts of shape {list(experts.shape)}, expected {list(shape)}"
            )
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self._experts:
            raise WireError(f"has a routed expert outside 0 to {self._experts - 1}")
        return experts


GateOutput = tuple[Tensor, Tensor, Tensor]  # logits, weights and the chosen experts


class RoutingReplay:
    """Wraps the gates of `model` to set their choice. Raises ConfigError where it cannot be set."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._gates = expert_gates(model)
        self._experts_of: dict[int, Tensor] = {}
        self.layers = layers_of(model)
        for layer, gate in self._gates.items():
            gate.forward = partial(self._choose, layer, gate.forward)
        self.experts, self.top_k = self._probe(model)

    def set_experts(self, experts: Tensor | None) -> None:
        """Set the experts that the gates choose until the next call, int16[slots, layers, top_k].

        -1 or None: the gate chooses. Keep them set until the backward pass, which computes
        checkpointed layers again. Raises WireError for experts of another model.
        """
        self._experts_of = {}
        if experts is None:
            return
        largest = int(experts.max()) if experts.numel() else -1
        if experts.shape[1:] != (self.layers, self.top_k) or largest >= self.experts:
            raise WireError(
                f"routed experts of another model: {experts.shape[1]} layers, "
                f"{experts.shape[2]} experts per token, largest index {largest}; the trainer's "
                f"model has {self.layers} layers and {self.top_k} of {self.experts} experts"
            )
        self._experts_of = {layer: experts[:, layer].long() for layer in self._gates}

    def _choose(
        self, layer: int, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if layer not in self._experts_of:
            return forward(hidden, *args, **kwargs)
        with _ForcedTopK(self._experts_of[layer]):
            return forward(hidden, *args, **kwargs)

    @torch.no_grad()
    def _probe(self, model: PreTrainedModel) -> tuple[int, int]:
        """Return experts per layer and per token; check that each gate accepts other experts."""
        name = type(model).__name__
        hint = "remove [learner] replay_routing from the config"
        with _recording(self._gates) as outputs:
            _run(model)
            if not outputs:
                raise ConfigError(f"{name} has no experts whose choice can be replayed", hint=hint)
            own = {layer: output[2] for layer, output in outputs.items()}
            logits = next(iter(outputs.values()))[0]
            experts = int(logits.shape[-1])
            self._experts_of = {layer: (chosen + 1) % experts for layer, chosen in own.items()}
            _run(model)
            unchanged = [
                layer
                for layer, expected in self._experts_of.items()
                if not torch.equal(outputs[layer][2], expected)
            ]
        self._experts_of = {}
        if unchanged:
            raise ConfigError(
                f"the choice of the gates of {name} cannot be set (layer {unchanged[0]})", hint=hint
            )
        return experts, int(own[next(iter(own))].shape[-1])


class _ForcedTopK(TorchFunctionMode):
    """Makes top-k over all experts return the given ones, int64[tokens, top_k]."""

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self._experts = experts

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        # models with groups of experts also select the best groups, in another shape
        if result.indices.shape != self._experts.shape:
            return result
        chosen = torch.where(self._experts < 0, result.indices, self._experts)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@contextmanager
def _recording(gates: dict[int, Any]) -> Iterator[dict[int, GateOutput]]:
    outputs: dict[int, GateOutput] = {}

    def record(layer: int, gate: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3:
            outputs[layer] = output

    hooks = [gate.register_forward_hook(partial(record, layer)) for layer, gate in gates.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _run(model: PreTrainedModel) -> None:
    model.base_model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False)
