"""Record which experts a transformers model chooses, for the trainer to repeat (arXiv:2510.11370).

Invariant: a row is from the forward pass that sampled the next token. Where tokens are read again,
by other weights or in the prefill of a continued rollout, the existing rows stay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.wire.expert_gates import expert_gates, layers_of
from producer_workers.engines.base import EngineError


class RoutingRecorder:
    """Hooks on the gates of `model`. Raises EngineError if no gate reports its choices."""

    def __init__(self, model: Any) -> None:
        self._layers = layers_of(model)
        self._chosen = dict[int, torch.Tensor]()
        for layer, gate in expert_gates(model).items():
            gate.register_forward_hook(partial(self._record, layer))
        with torch.inference_mode():
            model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
        if not self._chosen:
            hint = "set [engine] routed_experts only for a mixture of experts"
            raise EngineError(
                f"{type(model).__name__} has no gates that report the chosen experts", hint=hint
            )

    def take(self) -> NDArray[np.int16]:
        """Return the last forward pass's experts, int16[tokens, layers, top_k], of one request."""
        tokens, top_k = next(iter(self._chosen.values())).shape
        rows = np.zeros((tokens, self._layers, top_k), "<i2")
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen.cpu().numpy()
        return rows

    def _record(self, layer: int, gate: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
            self._chosen[layer] = output[2]


class RoutedTokens:
    def __init__(self) -> None:
        self._parts: list[NDArray[np.int16]] = []
        self._known = 0

    def add(self, first: int, rows: NDArray[np.int16]) -> None:
        """Add the rows of tokens from number `first` on, except known ones."""
        new = rows[self._known - first :]
        self._parts.append(new)
        self._known += len(new)

    def whole(self) -> NDArray[np.int16] | None:
        """Return int16[P + R - 1, layers, top_k]; None if nothing was recorded."""
        return np.concatenate(self._parts) if self._parts else None
