"""A device that trainer and engines share (colocated flow): the trainer's half of sleeping and waking.

    engines   awake ──pause: receipts say asleep──▶ asleep ───────────── continue ──▶ awake
    trainer   asleep ────────────────────────────▶ awake: train, save, publish ──▶ asleep

Whoever sleeps keeps its weights in the processor's memory, so the device is never asked for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Part = tuple[Sequence[nn.Module], torch.optim.Optimizer]


class DeviceShare:
    """Weights, gradients and optimizer state of `parts` (modules and their optimizer); on `device` while awake."""

    def __init__(
        self, device: torch.device, parts: Sequence[tuple[Sequence[nn.Module], torch.optim.Optimizer]]
    ) -> None:
        self._device, self._parts = device, parts
        self.is_asleep = False

    def sleep(self) -> None:
        """Leave the device. What is asleep can be saved, but not trained."""
        for _, optimizer in self._parts:
            optimizer.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.is_asleep = True

    def wake(self) -> None:
        """Come back to the device, with the very numbers that left it."""
        self._move(self._device)
        self.is_asleep = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    def _move(self, device: torch.device) -> None:
        for modules, optimizer in self._parts:
            for module in modules:
                module.to(device)  # in place: the optimizer's parameters are the same objects
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[name] = value.to(device)
