"""Receive weights from the trainer's memory; `consumer/senders/tensor_server.py` sends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from buffer.errors import WireError
from buffer.weights.checksums import CheckedStream
from buffer.weights.process_group import ENGINE, STALL_S, ProcessGroup
from buffer.weights.rendezvous import Rendezvous
from buffer.weights.safetensors_files import DTYPES, TensorSpan, parse_tensors
from buffer.weights.transport import Announcement


class TensorReceiver:
    """Receives an announced version on a thread. `limit_s`: the longest wait for a free slot."""

    def __init__(
        self, announced: Announcement, *, limit_s: float, stall_s: float = STALL_S
    ) -> None:
        self._announced = announced
        self._limit_s = limit_s
        self._stall_s = stall_s
        has_gpu = torch.cuda.is_available()
        self._gpu = torch.cuda.current_device() if has_gpu else None
        self._files: list[tuple[Tensor, dict[str, TensorSpan]]] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tensor-receiver", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Return whether everything arrived unchanged. Raises the error that ended the transfer."""
        if self._failure:
            raise self._failure
        return not self._thread.is_alive()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for data, spans in self._files:
            for name, span in spans.items():
                raw = data[span.start : span.end]
                dtype = getattr(torch, DTYPES[span.dtype])
                aligned = raw if span.start % dtype.itemsize == 0 else raw.clone()
                yield name, aligned.view(dtype).reshape(span.shape)

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:
            self._failure = error  # `is_done` raises it on the caller's thread

    def _receive(self) -> None:
        announced = self._announced
        with Rendezvous.connect(announced.host, announced.port, announced.token) as rendezvous:
            rendezvous.put("wanted", announced.label.encode())
            refusal = rendezvous.get("refusal", self._limit_s).decode(errors="replace")
            if refusal:
                raise WireError(f"the trainer does not send {announced.label}: {refusal}")
            group = ProcessGroup(
                torch, rendezvous, announced.backend, ENGINE, stall_s=self._stall_s, gpu=self._gpu
            )
            try:
                with closing(group):
                    files = [self._receive_file(group, name) for name in announced.files]
                    rendezvous.get("sent", self._stall_s)
            except (WireError, KeyError) as error:
                rendezvous.put("verdict", str(error).encode())
                raise
            self._files = files
            rendezvous.put("verdict", b"")

    def _receive_file(self, group: ProcessGroup, name: str) -> tuple[Tensor, dict[str, TensorSpan]]:
        facts = self._announced.files[name]
        data = torch.empty(facts.bytes, dtype=torch.uint8)
        checked = CheckedStream(name, facts)
        group.receive(data, lambda chunk: checked.update(chunk.numpy().data))
        spans = parse_tensors(memoryview(data.numpy().data))
        unknown = sorted({span.dtype for span in spans.values()} - DTYPES.keys())
        if unknown:
            raise WireError(f"{name} has tensors of an unknown type: {unknown[0]}")
        return data, spans
