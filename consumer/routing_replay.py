"""Rollout routing replay: train a mixture of experts with the experts that the engine chose.

(arXiv:2510.11370.) Engine and trainer compute the same gates to a few digits. Where two experts are
about equally good, they choose differently, and the ratio of such a token carries no information
about the policy. So the recorded choice is used, while the weights of the chosen experts are the
trainer's own, with their gradient. A gate runs its own code: only the result of its top-k is
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from buffer.errors import ConfigError, WireError
from buffer.expert_gates import expert_gates, layers_of
from buffer.media import MediaFolder
from consumer.recorded_experts import RecordedExperts

GateOutput = tuple[Tensor, Tensor, Tensor]
"""Logits, weights and the chosen experts."""


class RoutingReplay:
    """Wrap the gates of `model` so that their choice can be set.

    Raises ConfigError where the model has no gates, or gates whose choice cannot be set.

        replay = RoutingReplay(model)
        replay.set_experts(batch.experts)
        model(input_ids=batch.input_ids, ...)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._gates = expert_gates(model)
        self._experts_of: dict[int, Tensor] = {}
        self.layers = layers_of(model)
        for layer, gate in self._gates.items():
            gate.forward = partial(self._choose, layer, gate.forward)
        self.experts, self.top_k = self._probe(model)

    def recorded_experts(self, media: MediaFolder | None) -> RecordedExperts:
        """Return a reader of recorded experts for this model."""
        return RecordedExperts(self.layers, self.top_k, self.experts, media)

    def set_experts(self, experts: Tensor | None) -> None:
        """Set the experts that the gates choose until the next call.

        `experts`: int16[slots, layers, top_k], -1 where a gate chooses itself; None: every gate
        chooses itself. It must stay set until the backward pass: checkpointed layers are computed
        again there. Raises WireError where it was recorded with another model.
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
        """Return the number of experts of a layer, and how many of them a token uses.

        Sets each gate to experts that it did not choose, and checks that it then returns them.
        """
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
    """Within this context, top-k over all experts returns the given ones, int64[tokens, top_k]."""

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
    """Record the newest output of each gate, by layer."""
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
