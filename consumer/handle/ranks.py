"""The ranks of a data-parallel trainer: rank 0 decides, and all ranks execute its orders.

rank 0                                    every other rank
lead(act)                                 follow()
  a method marked `on_all_ranks` ───────▶   executes it with the same arguments
the value or the error of `act` ──────▶   returns or raises it

Each order ends with an exchange, so no rank continues alone: one that dies or fails breaks it for
all others (RankLost, or an error of torch). Rank 0 notices a signal on any rank after the next
order.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from buffer.errors import CheckpointNow, ConfigError, Fenced, GroupChanged, RankLost, StepFailed
from consumer.handle.batch import Stopped

P = ParamSpec("P")
T = TypeVar("T")


def join() -> Ranks:
    """Join the ranks that torchrun or `rolloutmq run` started; return ALONE for a single one.

    Exchanges get a gloo group beside a default process group that exists. Each attempt of
    `--max-restarts` gets keys of its own: in the shared store, ranks may find the address of a dead
    one (torch 2.13: "Gloo connectFullMesh failed", at every attempt after the first).
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return ALONE
        store, rank, size = next(rendezvous("env://"))
        own = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    # ranks wait for rank 0, which waits for groups; a death is noticed at once
    return Ranks(dist.new_group(backend="gloo", timeout=timedelta(days=30)))


def select_device(name: str, ranks: Ranks) -> str:
    """Return the device of this rank for [trainer] device, and make it CUDA's current one.

    A rank uses the GPU with its LOCAL_RANK. Call it before anything uses CUDA: a context on another
    GPU never returns its memory. Raises ConfigError if this rank would share a GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if ":" in name:
        if ranks.size > 1:
            raise ConfigError(
                f"[trainer] device = {name} is one GPU, but the trainer has {ranks.size} ranks",
                hint='set device = "auto": each rank then uses the GPU with its LOCAL_RANK',
            )
        return name
    if ranks.size == 1:
        return "cuda"
    gpus = torch.cuda.device_count()
    # a single visible GPU is in a CUDA_VISIBLE_DEVICES of this rank alone; NCCL refuses others
    index = 0 if gpus == 1 else int(os.environ["LOCAL_RANK"])
    if index >= gpus:
        raise ConfigError(
            f"rank {ranks.rank} needs GPU {index} of this machine, and {gpus} are visible",
            hint="start as many ranks on a machine as it has GPUs for the trainer "
            "(--nproc-per-node, [launch] trainer_ranks)",
        )
    torch.cuda.set_device(index)
    return f"cuda:{index}"


class Ranks:
    """Exchanges small values between the ranks of a gloo `group`; without one, there is one rank.

    All ranks call the same methods in the same order, but for `post` and `posted`. They raise
    RankLost if a rank is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1
        self._store: Any = PrefixStore("rolloutmq", _get_default_store()) if group else None

    def post(self, name: str, value: Any) -> None:
        """Store a JSON value for other ranks, once for each name, without waiting for them."""
        with self._connected():
            self._store.set(name, orjson.dumps(value).decode())

    def posted(self, name: str) -> Any:
        """Return the value that a rank stored under `name`; None if none has yet."""
        with self._connected():
            return orjson.loads(self._store.get(name)) if self._store.check([name]) else None

    def sum(self, values: Sequence[float]) -> list[float]:
        if self._group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self._connected():
            dist.all_reduce(total, group=self._group)
        return [float(value) for value in total]

    def max(self, value: int) -> int:
        return max(int(found) for found in self.gather(value))

    def share(self, value: Any = None) -> Any:
        """Return the `value` of rank 0 on every rank: any JSON value (never pickle)."""
        if self._group is None:
            return value
        data = _bytes(value)
        size = torch.tensor([len(data)])
        with self._connected():
            dist.broadcast(size, group_src=0, group=self._group)
            buffer = data if self.rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(buffer, group_src=0, group=self._group)
        return value if self.rank == 0 else _value(buffer)

    def gather(self, part: Any) -> list[Any]:
        """Return the `part` of every rank, in order of rank: any JSON value (never pickle)."""
        if self._group is None:
            return [part]
        data = _bytes(part)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._connected():
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
            padded[: len(data)] = data
            parts = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._group)
        return [_value(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo has no error of its own
            raise RankLost(
                f"rank {self.rank} of the trainer has lost another one: {error}",
                hint="the log of the rank that ended first has the reason; all start again from "
                "the newest checkpoint",
            ) from error


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(orjson.dumps(value)), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return orjson.loads(data.numpy().tobytes())


ALONE = Ranks()


def balanced_shares(weights: Sequence[float], ranks: int) -> list[list[int]]:
    """Return for each rank the positions in `weights` that it gets, in ascending order.

    The heaviest go first, each to the rank with the least (Graham 1969: at most 4/3 of the
    optimum). Ties go to the earlier position and the lower rank, so every machine gets the same
    result.
    """
    if ranks == 1:
        return [list(range(len(weights)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # ties of loads go to the rank with the fewest
    least = [(0.0, 0, rank) for rank in range(ranks)]
    for position in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        load, count, rank = least[0]
        shares[rank].append(position)
        heapq.heapreplace(least, (load + weights[position], count + 1, rank))
    return [sorted(share) for share in shares]


SHARED_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointNow, Fenced, GroupChanged, Stopped, TimeoutError)
}  # the caller can act on these errors of rank 0, so every rank raises them unchanged


class Follower(Protocol):
    orders: RankOrders


F = TypeVar("F", bound=Follower)


def on_all_ranks(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Make all ranks execute a method when rank 0 calls it.

    Positional arguments are JSON values that all ranks get; keyword arguments stay on rank 0.
    """

    @wraps(method)
    def executed(self: F, /, *args: P.args, **kwargs: P.kwargs) -> T:
        order = [self.orders.name_of(self), method.__name__, args]
        return self.orders.execute(order, lambda: method(self, *args, **kwargs))

    return executed


class RankOrders:
    """The orders of rank 0 to all `ranks`; every rank adds the objects that execute them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # Set by a signal on any rank; rank 0 learns of it after an order.
        self.stopped = threading.Event()
        self.is_in_order = False  # True during an order, and for good after one that failed
        self._followers: dict[str, Follower] = {}

    def add(self, name: str, follower: Follower) -> None:
        """Let a follower execute orders: on every rank, under the same name, which is new."""
        if name in self._followers:
            raise ValueError(f"the ranks have a follower {name!r} already")
        self._followers[name] = follower

    def name_of(self, follower: Follower) -> str:
        return next(name for name, each in self._followers.items() if each is follower)

    def execute(self, order: Sequence[Any], act: Callable[[], T]) -> T:
        """Pass an order to the other ranks, execute it, and wait until all have."""
        if self.ranks.rank == 0:
            if self.is_in_order and self.ranks.size > 1:
                raise StepFailed(
                    f"an order to all ranks failed on rank 0, so {order[1]} cannot follow",
                    hint="start the trainer again: it continues from the newest checkpoint",
                )
            self.ranks.share({"order": order})
        self.is_in_order = True
        result = act()
        if any(self.ranks.gather(self.stopped.is_set())):
            self.stopped.set()
        self.is_in_order = False
        return result

    def follow(self) -> Any:
        """Execute rank 0's orders; return or raise the result of its `lead`. Raises RankLost."""
        while True:
            message = self.ranks.share()
            if "value" in message:
                return message["value"]
            if "error" in message:
                kind = SHARED_ERRORS.get(message["error"], StepFailed)
                raise kind(f"rank 0: {message['error']}: {message['reason']}")
            name, method, args = message["order"]
            getattr(self._followers[name], method)(*args)

    def lead(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0, which may give orders; share its JSON value, or its error."""
        try:
            value = act()
        except Exception as error:  # the other ranks wait for it, and raise it as well
            if not self.is_in_order:
                self.ranks.share({"error": type(error).__name__, "reason": str(error)})
            raise
        self.ranks.share({"value": value})
        return value

    def end(self) -> None:
        """Let the other ranks end; those in an order that failed notice the end of this process."""
        if not self.is_in_order:
            with suppress(RankLost):  # it needs no order any more
                self.ranks.share({"value": None})
