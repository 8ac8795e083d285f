"""The ranks of a data-parallel trainer, as its arithmetic sees them: sums, a largest, what each
says; or one, alone.

Who of several gets which part of a batch: shares of about the same weight.
"""

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
    """Make the process group of a program that torchrun started, also where `--max-restarts` began
    it anew.

    All attempts share torchrun's store, and a rank may find there where one listened that is dead
    (torch 2.13: "Gloo connectFullMesh failed", at every attempt after the first): so each attempt
    has keys of its own.
    """
    store, rank, size = next(rendezvous("env://"))
    own = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


class Ranks:
    """All ranks call the same methods in the same order. `group` is one of gloo: what is said are a
    few numbers.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each over the ranks."""
        if self._group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return [float(value) for value in total]

    def max(self, value: int) -> int:
        return max(int(said) for said in self.say(value))

    def say(self, part: Any) -> list[Any]:
        """What every rank says, in order of rank: anything that JSON can hold (never pickle)."""
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
            orjson.loads(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)
        ]


ALONE = Ranks()


def balanced_shares(weights: Sequence[float], ranks: int) -> list[list[int]]:
    """The places of `weights` that each rank gets, ascending; every place once.

    Longest first, each to the rank with the least so far (Graham 1969: at most 4/3 of the best
    there is). The same on every machine: ties go to the earlier place and the lower rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(place)
        loads[rank] += weights[place]
    return [sorted(share) for share in shares]
