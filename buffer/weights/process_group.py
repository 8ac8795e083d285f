"""A torch process group of two: the trainer (rank 0) and one process of an engine (rank 1).

The backend is gloo or nccl; with nccl, bytes pass through a buffer on the GPU, from and to host
memory.

Invariant: nothing here waits longer than `stall_s` for a silent peer. A dead peer is noticed at
once: by gloo's own connections, or by the rendezvous, whose loss aborts an nccl group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from buffer.errors import WireError
from buffer.weights.rendezvous import Rendezvous

TRAINER = 0
ENGINE = 1
CHUNK_BYTES = 16 << 20
"""Size of one message. It has `stall_s` to arrive: with 30 s, a link must carry 0.5 MB/s."""

IN_FLIGHT = 2  # messages in flight while one is processed

POLL_S = 0.001  # an nccl operation is polled: it has no time limit that ends only itself


STALL_S = 30.0  # a peer that sends or takes no chunk for this long is given up


class ProcessGroup:
    """One side of the group; both sides open it at the same time. All methods raise WireError.

    `torch`: the module, which buffer must not load. `gpu`: for nccl; threads do not inherit it.
    """

    def __init__(
        self,
        torch: Any,
        rendezvous: Rendezvous,
        backend: str,
        rank: int,
        *,
        stall_s: float,
        gpu: int | None = None,
    ) -> None:
        self._torch = torch
        self._rendezvous = rendezvous
        self._stall_s = stall_s
        self._gpu = gpu
        self._is_nccl = backend == "nccl"
        self._peer = 1 - rank
        try:
            self._group: Any = self._open_nccl(rank) if self._is_nccl else self._open_gloo(rank)
        except (
            RuntimeError,
            AttributeError,
        ) as error:  # AttributeError: torch without this backend
            message = f"cannot open a {backend} process group: {_first_line(error)}"
            raise WireError(message) from error
        rendezvous.on_loss(self._abort)

    def close(self) -> None:
        """Close the connections, although an exception may still refer to this group.

        Call it once both sides have everything: gloo may report the end as a failed transfer.
        """
        self._abort()
        self._group = None

    def _abort(self) -> None:
        if group := self._group:
            group.abort()

    def send(self, data: Any) -> None:
        """Send all bytes of a uint8[n] in host memory."""
        device = f"cuda:{self._gpu}"
        chunks = (
            (chunk, chunk.to(device) if self._is_nccl else chunk)
            for chunk in data.split(CHUNK_BYTES)
        )
        self._transfer("send", chunks, lambda chunk, buffer: None)

    def receive(self, data: Any, arrived: Callable[[Any], None]) -> None:
        """Fill a uint8[n] in host memory; call `arrived` with each chunk while the next comes."""

        def store(chunk: Any, buffer: Any) -> None:
            if buffer is not chunk:
                chunk.copy_(buffer)
            arrived(chunk)

        def buffer_for(chunk: Any) -> Any:
            if not self._is_nccl:
                return chunk
            return self._torch.empty_like(chunk, device=f"cuda:{self._gpu}")

        chunks = ((chunk, buffer_for(chunk)) for chunk in data.split(CHUNK_BYTES))
        self._transfer("recv", chunks, store)

    def _transfer(
        self, operation: str, chunks: Iterator[tuple[Any, Any]], done: Callable[[Any, Any], None]
    ) -> None:
        """Move pairs (host memory, buffer of the backend), `IN_FLIGHT` of them ahead of `done`."""
        in_flight: deque[tuple[Any, Any, Any]] = deque()
        try:
            for chunk, buffer in chunks:
                work = getattr(self._group, operation)([buffer], self._peer, 0)
                in_flight.append((work, chunk, buffer))
                del work
                if len(in_flight) > IN_FLIGHT:
                    done(*self._finish(*in_flight.popleft()))
            while in_flight:
                done(*self._finish(*in_flight.popleft()))
        except RuntimeError as error:
            raise WireError(f"the transfer was cut: {_first_line(error)}") from None
        finally:
            in_flight.clear()  # what an exception refers to would keep the connections open

    def _finish(self, work: Any, chunk: Any, buffer: Any) -> tuple[Any, Any]:
        try:
            if self._rendezvous.is_lost:
                raise WireError("the peer left during the transfer")
            if self._is_nccl:
                self._poll(work)
            else:
                work.wait()
        finally:
            del work
        return chunk, buffer

    def _poll(self, work: Any) -> None:
        """Wait for an nccl operation, whose kernel would wait for a dead peer forever."""
        deadline = time.monotonic() + self._stall_s
        while not work.is_completed():
            if self._rendezvous.is_lost or time.monotonic() > deadline:
                self._abort()
                raise WireError("the peer stopped responding during the transfer")
            time.sleep(POLL_S)

    def _open_gloo(self, rank: int) -> Any:
        kind = self._torch.distributed.ProcessGroupGloo
        options = kind._Options()
        options._timeout = timedelta(seconds=self._stall_s)
        # the interface of the rendezvous: by default, gloo takes the one of the host's name
        options._devices = [kind.create_device(hostname=self._rendezvous.own_host)]
        return kind(self._store(), rank, 2, options)

    def _open_nccl(self, rank: int) -> Any:
        kind = self._torch.distributed.ProcessGroupNCCL
        options = kind.Options()
        # torch's watchdog ends the process when an operation is late: it must never find one
        options._timeout = timedelta(days=1)
        return kind(self._store(), rank, 2, options)

    def _store(self) -> Any:
        """Wrap the rendezvous as the store in which torch's groups exchange their addresses."""
        rendezvous = self._rendezvous
        stall_s = self._stall_s

        class RendezvousStore(self._torch.distributed.Store):  # type: ignore[misc, name-defined]
            def set(self, key: str, value: bytes) -> None:
                rendezvous.put(f"group/{key}", bytes(value))

            def get(self, key: str) -> bytes:
                return rendezvous.get(f"group/{key}", stall_s)

            def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
                for key in keys:
                    rendezvous.get(f"group/{key}", stall_s)

            def check(self, keys: list[str]) -> bool:
                return all(rendezvous.has(f"group/{key}") for key in keys)

        return RendezvousStore()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
