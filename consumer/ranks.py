"""The ranks of a data-parallel trainer: how they exchange values and share a batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def join() -> None:
    """Create the process group of a program that torchrun started, restarts included.

    All attempts of `--max-restarts` share torchrun's store, where a rank may find the address of
    one that is dead (torch 2.13: "Gloo connectFullMesh failed", at every attempt after the first).
    Therefore each attempt gets keys of its own.
    """
    store, rank, size = next(rendezvous("env://"))
    own = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


class Ranks:
    """Exchanges small values between the ranks of a gloo `group`; without one, there is one rank.

    All ranks call the same methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the ranks."""
        if self._group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(value) for value in total]

    def max(self, value: int) -> int:
        """Return the largest value of all ranks."""
        return max(int(found) for found in self.gather(value))

    def gather(self, part: Any) -> list[Any]:
        """Return the `part` of every rank, in order of rank: any JSON value (never pickle)."""
        if self._group is None:
            return [part]
        data = torch.frombuffer(bytearray(orjson.dumps(part)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [
            orjson.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]


ALONE = Ranks()


def balanced_shares(weights: Sequence[float], ranks: int) -> list[list[int]]:
    """Return for each rank the positions in `weights` that it gets, in ascending order.

    The heaviest come first, each for the rank with the least so far (Graham 1969: at most 4/3 of
    the optimum). The result is the same on every machine: ties go to the earlier position and the
    lower rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for position in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(position)
        loads[rank] += weights[position]
    return [sorted(share) for share in shares]
