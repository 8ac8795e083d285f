"""Weights in host memory: copied after a step, written to files during the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from buffer.weights.checksums import RawTensor, WrittenFiles, write_tensors
from buffer.weights.safetensors_files import DTYPES

_NAMES = {getattr(torch, name): code for code, name in DTYPES.items()}


class HostBuffers:
    """Host memory for copies of tensors, pinned for those of a GPU, and reused by each copy.

    Invariant: a copy stays as it is until the next copy of a tensor of that name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy, floats rounded to `dtype`; from a GPU, complete only after `wait`."""
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != kind:
            buffer = torch.empty(tensor.shape, dtype=kind, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """The files of one version that this rank writes.

    file: the name of its safetensors file; "": it has none. write_others: writes the small files.
    """

    file: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    write_others: Callable[[Path], None]

    def write(self, folder: Path) -> WrittenFiles:
        """Write the files into an existing folder; return the checksums of the tensors' file."""
        self.write_others(folder)
        if not self.file:
            return WrittenFiles()
        raw = {name: _raw(tensor) for name, tensor in self.tensors.items()}
        facts = write_tensors(folder / self.file, raw, self.metadata)
        return WrittenFiles({self.file: facts})


def _raw(tensor: Tensor) -> RawTensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(_NAMES[tensor.dtype], tuple(tensor.shape), data.data)
