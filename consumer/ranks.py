"""The ranks of a data-parallel trainer, as its arithmetic sees them: sums, a largest, what each says; or one, alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import torch
import torch.distributed as dist


class Ranks:
    """All ranks call the same methods in the same order. `group` is one of gloo: what is said are a few numbers."""

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
        return [orjson.loads(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]


ALONE = Ranks()
