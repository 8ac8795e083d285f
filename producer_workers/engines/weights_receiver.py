"""The engine's side of a transfer of weights: runs in each process that has a part of the model.

    receive   beside the forward passes, on a thread, into host memory; every file's checksum is compared
    load      (the worker extension) once all processes of the engine have all of it, between two forward passes

So what is torn or wrong is thrown away before a model is touched, and no process is ahead of another one. It costs
one copy of the weights in host memory for each process, until they are loaded.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import closing

import torch
import torch.distributed  # the group needs it

from buffer.errors import WireError
from buffer.weights.announcement import Announcement
from buffer.weights.process_group import ENGINE, ProcessGroup
from buffer.weights.rendezvous import Rendezvous
from buffer.weights.safetensors_files import TensorSpan, parse_tensors

STALL_S = 30.0
"""A trainer that sends no chunk for so long is given up."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightsReceiver:
    """Begins to receive `announced` at once; `limit_s` is how long it may wait for its turn."""

    def __init__(self, announced: Announcement, *, limit_s: float, stall_s: float = STALL_S) -> None:
        self._announced, self._limit_s, self._stall_s = announced, limit_s, stall_s
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._files: list[tuple[torch.Tensor, dict[str, TensorSpan]]] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weights-receiver", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether all of it is here and right. Raises what went wrong."""
        if self._failure:
            raise self._failure
        return not self._thread.is_alive()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, in the order of the files, in the memory that they came into."""
        for data, places in self._files:
            for name, place in places.items():
                raw, dtype = data[place.start : place.end], DTYPES[place.dtype]
                aligned = raw if place.start % dtype.itemsize == 0 else raw.clone()
                yield name, aligned.view(dtype).reshape(place.shape)

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:
            self._failure = error  # for `is_done`, on the thread that asks

    def _receive(self) -> None:
        announced = self._announced
        with Rendezvous.connect(announced.host, announced.port, announced.token) as rendezvous:
            rendezvous.put("wanted", announced.label.encode())
            if refusal := rendezvous.get("refusal", self._limit_s):
                raise WireError(f"the trainer has no {announced.label} to give: {refusal.decode(errors='replace')}")
            group = ProcessGroup(rendezvous, announced.backend, ENGINE, stall_s=self._stall_s, gpu=self._gpu)
            try:
                with closing(group):
                    files = [self._receive_file(group, name) for name in announced.files]
                    rendezvous.get("sent", self._stall_s)
            except (WireError, KeyError) as error:
                rendezvous.put("verdict", str(error).encode())
                raise
            self._files = files
            rendezvous.put("verdict", b"")

    def _receive_file(self, group: ProcessGroup, name: str) -> tuple[torch.Tensor, dict[str, TensorSpan]]:
        facts = self._announced.files[name]
        data, digest = torch.empty(facts.bytes, dtype=torch.uint8), hashlib.blake2b(digest_size=16)
        group.receive(data, lambda part: digest.update(part.numpy().data))
        if digest.hexdigest() != facts.blake2b:
            raise WireError(f"{name} is not what was announced")
        places = parse_tensors(memoryview(data.numpy().data))
        if strange := sorted({place.dtype for place in places.values()} - DTYPES.keys()):
            raise WireError(f"{name} has tensors of the unknown type {strange[0]}")
        return data, places
