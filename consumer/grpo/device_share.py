"""A device shared by trainer and engines (colocated flow): how the trainer sleeps and wakes.

engines   awake ──pause: confirmed as asleep──▶ asleep ───────────── continue ──▶ awake
trainer   asleep ────────────────────────────▶ awake: train, save, publish ──▶ asleep

The side that sleeps keeps its weights in host memory, so the device never holds both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Part = tuple[Sequence[nn.Module], torch.optim.Optimizer]  # as `Learner.on_device` returns them


class DeviceShare:
    """Moves the weights, gradients and optimizer state of `parts` to `device` and away from it."""

    def __init__(self, device: torch.device, parts: Sequence[Part]) -> None:
        self._device = device
        self._parts = parts
        self.is_asleep = False

    def sleep(self) -> None:
        """Free the device. Parts that sleep can be saved, but not trained."""
        for _, optimizer in self._parts:
            optimizer.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_asleep = True

    def wake(self) -> None:
        self._move(self._device)
        self.is_asleep = False

    def _move(self, device: torch.device) -> None:
        for modules, optimizer in self._parts:
            for module in modules:
                # in place: the optimizer holds the same parameter objects
                module.to(device)
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[name] = value.to(device)
