"""The way of the tensors: a process group of torch, of the trainer (rank 0) and a process of an engine (rank 1).

The backend is gloo or nccl; both run the same lines, but for the making of the group and the wait. With nccl the bytes
go through a buffer on the GPU; on either side they come from, and go to, host memory.

torch comes as an argument, since buffer/ needs none: `import torch.distributed` must have been done.

Invariant: nothing in here waits longer than `stall_s` for a silent peer, and a peer that died is noticed at once:
gloo by its own connections, nccl by the meeting, whose end aborts the group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from buffer.errors import WireError
from buffer.weights.rendezvous import Meeting

TRAINER, ENGINE = 0, 1
CHUNK_BYTES = 16 << 20
"""One message. It has `stall_s` to arrive: with 30 s, a link must carry 0.5 MB/s."""

AHEAD = 2
"""Messages under way while one is looked at."""

POLL_S = 0.001
"""How often an operation of nccl is looked at, which has no time limit of its own that ends only itself."""


class WeightsGroup:
    """Made by both sides of a meeting at the same time. Raises WireError, as all its methods do.

    `gpu`: the device that nccl uses on this side. Threads do not inherit it.
    """

    def __init__(
        self, torch: Any, meeting: Meeting, backend: str, rank: int, *, stall_s: float, gpu: int | None = None
    ) -> None:
        self._torch, self._meeting, self._stall_s, self._gpu = torch, meeting, stall_s, gpu
        self._is_nccl, self._peer = backend == "nccl", 1 - rank
        try:
            self._group: Any = self._open_nccl(rank) if self._is_nccl else self._open_gloo(rank)
        except (RuntimeError, AttributeError) as error:  # AttributeError: this torch was built without that backend
            raise WireError(f"no {backend} group of the two could be made: {_first_line(error)}") from error
        meeting.on_loss(self._abort)

    def close(self) -> None:
        """Its connections end here, and not with the last exception that remembers it: the other side must see it.

        Only once both sides have all they want: gloo may take the end for a failure of what has just arrived.
        """
        self._abort()
        self._group = None

    def _abort(self) -> None:
        if group := self._group:
            group.abort()

    def send(self, data: Any) -> None:
        """All bytes of a uint8[n] in host memory."""
        chunks = ((chunk, chunk.to(f"cuda:{self._gpu}") if self._is_nccl else chunk) for chunk in self._chunks(data))
        self._move("send", chunks, lambda chunk, part: None)

    def receive(self, data: Any, arrived: Callable[[Any], None]) -> None:
        """The same into a uint8[n] of that length; `arrived` is called with each part while the next one comes."""

        def keep(chunk: Any, part: Any) -> None:
            if part is not chunk:
                chunk.copy_(part)
            arrived(chunk)

        def room(chunk: Any) -> Any:
            return self._torch.empty_like(chunk, device=f"cuda:{self._gpu}") if self._is_nccl else chunk

        self._move("recv", ((chunk, room(chunk)) for chunk in self._chunks(data)), keep)

    def _chunks(self, data: Any) -> Iterator[Any]:
        return iter(data.split(CHUNK_BYTES))

    def _move(self, how: str, chunks: Iterator[tuple[Any, Any]], done: Callable[[Any, Any], None]) -> None:
        """send or recv each chunk, `AHEAD` before `done`. It is a pair: in host memory, and what the wire sees."""
        moving: deque[tuple[Any, Any, Any]] = deque()
        try:
            for chunk, part in chunks:
                moving.append((getattr(self._group, how)([part], self._peer, 0), chunk, part))
                if len(moving) > AHEAD:
                    done(*self._finish(*moving.popleft()))
            while moving:
                done(*self._finish(*moving.popleft()))
        except RuntimeError as error:
            raise WireError(f"the transfer was cut: {_first_line(error)}") from None
        finally:
            moving.clear()  # what an exception remembers would keep the connections open

    def _finish(self, work: Any, chunk: Any, part: Any) -> tuple[Any, Any]:
        try:
            if self._meeting.is_lost:
                raise WireError("the other side left in the middle of the weights")
            if self._is_nccl:
                self._watch(work)
            else:
                work.wait()
        finally:
            del work
        return chunk, part

    def _watch(self, work: Any) -> None:
        """Until an operation of nccl is done: its kernel would wait for a dead peer for ever."""
        deadline = time.monotonic() + self._stall_s
        while not work.is_completed():
            if self._meeting.is_lost or time.monotonic() > deadline:
                self._abort()
                raise WireError("the other side fell silent in the middle of the weights")
            time.sleep(POLL_S)

    def _open_gloo(self, rank: int) -> Any:
        kind = self._torch.distributed.ProcessGroupGloo
        options = kind._Options()
        options._timeout = timedelta(seconds=self._stall_s)
        # the interface on which the two have met; gloo's own choice is what the host's name stands for
        options._devices = [kind.create_device(hostname=self._meeting.own_host)]
        return kind(self._store(), rank, 2, options)

    def _open_nccl(self, rank: int) -> Any:
        kind = self._torch.distributed.ProcessGroupNCCL
        options = kind.Options()
        # torch's own watchdog ends the whole process where an operation is late: it must never find one
        options._timeout = timedelta(days=1)
        return kind(self._store(), rank, 2, options)

    def _store(self) -> Any:
        """The meeting as torch's groups want it: their addresses go through nothing but this."""
        meeting, stall_s = self._meeting, self._stall_s

        class MeetingStore(self._torch.distributed.Store):  # type: ignore[misc, name-defined]
            def set(self, key: str, value: bytes) -> None:
                meeting.put(f"group/{key}", bytes(value))

            def get(self, key: str) -> bytes:
                return meeting.get(f"group/{key}", stall_s)

            def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
                for key in keys:
                    meeting.get(f"group/{key}", stall_s)

            def check(self, keys: list[str]) -> bool:
                return all(meeting.has(f"group/{key}") for key in keys)

        return MeetingStore()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
