"""Rollout routing replay: a mixture of experts is trained with the experts that the engine chose (arXiv:2510.11370).

Engine and trainer compute the same gates to a few digits; where two experts are about as good, they choose differently,
and the ratio of such a token says nothing about the policy. So the choice is the recorded one, and the weights of the
chosen ones are the trainer's own, with their gradient. A gate runs its own code: only its top-k is told what to find.
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


class RoutingReplay:
    """Stands before the gates of `model`. ConfigError where it has none, or some that do not do as they are told."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._gates, self.layers = expert_gates(model), layers_of(model)
        self._told: dict[int, Tensor] = {}
        for layer, gate in self._gates.items():
            gate.forward = partial(self._choose, layer, gate.forward)
        self.experts, self.top_k = self._try(model)

    def tell(self, experts: Tensor | None) -> None:
        """What the gates choose until told otherwise, in the backward pass of a checkpointed layer, too.

        int16[slots, layers, top_k], -1 where they choose for themselves; None: they do everywhere. Raises WireError
        where it is of another model.
        """
        self._told = {}
        if experts is None:
            return
        largest = int(experts.max()) if experts.numel() else -1
        if experts.shape[1:] != (self.layers, self.top_k) or largest >= self.experts:
            found = f"{experts.shape[1]} layers, {experts.shape[2]} experts of each token, one of them number {largest}"
            own = f"the trainer's has {self.layers} layers and {self.top_k} of {self.experts} experts"
            raise WireError(f"routed experts of another model: {found}; {own}")
        self._told = {layer: experts[:, layer].long() for layer in self._gates}

    def _choose(self, layer: int, forward: Callable[..., Any], hidden: Tensor, *more: Any, **named: Any) -> Any:
        if layer not in self._told:
            return forward(hidden, *more, **named)
        with _ToldTopK(self._told[layer]):
            return forward(hidden, *more, **named)

    @torch.no_grad()
    def _try(self, model: PreTrainedModel) -> tuple[int, int]:
        """Experts of a layer, and how many of them a token has; found by telling each gate what it did not choose."""
        name, hint = type(model).__name__, "leave out [learner] replay_routing"
        with _listening(self._gates) as heard:
            _run(model)
            if not heard:
                raise ConfigError(f"{name} has no experts whose choice could be replayed", hint=hint)
            own = {layer: output[2] for layer, output in heard.items()}
            logits = next(iter(heard.values()))[0]
            experts = int(logits.shape[-1])
            self._told = {layer: (chosen + 1) % experts for layer, chosen in own.items()}
            _run(model)
            deaf = [layer for layer, told in self._told.items() if not torch.equal(heard[layer][2], told)]
        self._told = {}
        if deaf:
            raise ConfigError(f"the gates of {name} cannot be told what to choose (layer {deaf[0]})", hint=hint)
        return experts, int(own[next(iter(own))].shape[-1])


class _ToldTopK(TorchFunctionMode):
    """Within it, the top-k over all experts finds the ones that it was told, int64[tokens, top_k]."""

    def __init__(self, told: Tensor) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        # models with groups of experts ask for the best of each group, too: in another shape
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._told.shape:
            return found
        chosen = torch.where(self._told < 0, found.indices, self._told)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@contextmanager
def _listening(gates: dict[int, Any]) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """What each gate answered last: logits, weights and the experts it chose."""
    heard: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def hear(layer: int, gate: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3:
            heard[layer] = output

    hooks = [gate.register_forward_hook(partial(hear, layer)) for layer, gate in gates.items()]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _run(model: PreTrainedModel) -> None:
    model.base_model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False)
