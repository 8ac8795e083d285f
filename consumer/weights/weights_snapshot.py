"""A version of weights in host memory: copied on the step, written to files beside that.

    trainer's thread   copies tensor after tensor into the buffers, and marks each as copied
    writer             writes each tensor once it is copied; it may begin before the first copy,
                       where the buffers of the version before give sizes and order

Both end if the copying fails. The trainer waits for its copies only, never for the writer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from buffer.weights.checksums import Algorithm, WrittenFiles
from buffer.weights.safetensors_files import DTYPES
from buffer.weights.tensor_file import RawTensor, write_tensors

_NAMES = {getattr(torch, name): code for code, name in DTYPES.items()}


class Copies:
    """Which tensors of a snapshot are copied. One thread adds them, others wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: dict[str, torch.cuda.Event | None] = {}
        self._failure: BaseException | None = None

    def add(self, name: str, *, on_gpu: bool) -> None:
        """Note that the copy of a tensor was begun on a GPU, or made."""
        event = None
        if on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        with self._changed:
            self._events[name] = event
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in all that wait."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Wait until a tensor is copied. Raises what ended the copying."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._events or self._failure)
            if name not in self._events and self._failure:
                raise self._failure
        if event := self._events[name]:
            event.synchronize()


class HostBuffers:
    """Host memory for copies of tensors: pinned for those of a GPU, and used again by each copy.

    Invariant: a copy stays as it is until the next copy of a tensor of that name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._dtype: torch.dtype | None = None
        self.copies = Copies()
        """of the snapshot in progress"""

    def begin(self, dtype: torch.dtype | None) -> Mapping[str, Tensor]:
        """Begin a snapshot; return the buffers that it will fill, in order, if they are known."""
        if dtype != self._dtype:
            self._buffers = {}
        self._dtype = dtype
        self.copies = Copies()
        return dict(self._buffers)

    def copy(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy, rounded to `dtype` where it is floating point.

        That of a tensor on a GPU is complete only after `wait`.
        """
        kind = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != kind:
            buffer = torch.empty(tensor.shape, dtype=kind, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(tensor, non_blocking=True)
        self.copies.add(name, on_gpu=tensor.is_cuda)
        return buffer

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """The files of one version that this rank writes.

    file: the name of its safetensors file; "": it has none. write_others: writes the small files.
    copies: of the tensors that may not be complete yet; None: all are.
    """

    file: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    write_others: Callable[[Path], None]
    copies: Copies | None = None

    def write(self, folder: Path, algorithm: Algorithm = "xxh3") -> WrittenFiles:
        """Write the files into an existing folder; return the checksums of the tensors' file."""
        self.write_others(folder)
        if not self.file:
            return WrittenFiles()
        raw = {name: _raw(tensor) for name, tensor in self.tensors.items()}
        wait = self.copies.wait if self.copies else None
        facts = write_tensors(folder / self.file, raw, self.metadata, algorithm, wait)
        return WrittenFiles({self.file: facts})


class NextSnapshot(Future[WeightsSnapshot]):
    """A snapshot that a writer awaits: it has its files, though not all tensors are copied yet."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Let the writer fail with what fails in this block."""
        try:
            yield
        except BaseException as error:
            if not self.done():
                self.set_exception(error)
            elif copies := self.result().copies:
                copies.fail(error)
            raise


def _raw(tensor: Tensor) -> RawTensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(_NAMES[tensor.dtype], tuple(tensor.shape), data.data)
