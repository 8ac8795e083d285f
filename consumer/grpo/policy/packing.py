"""Packing: from the table of a batch to micro-batches of a bounded number of token slots.

Rows take samples first fit decreasing, and are as wide as their longest sample: without a
variable-length kernel, attention costs the square of a row. Positions restart at 0 at each sample:
without a mask, transformers 5 finds the samples by them. A row's unused end continues the last one.

Invariant: every kept response token is in exactly one micro-batch, with its rollout's logprob and
mask. A plan reads lengths only; tokens are copied when a micro-batch is used.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from consumer.grpo.policy.mask_reader import MaskReader
from consumer.grpo.policy.micro_batch import Layout, MicroBatches
from consumer.grpo.policy.routing_replay import RecordedExperts
from consumer.handle.batch import BatchTable, Ints


class Packer:
    """Packs rollouts into micro-batches of at most `token_budget` slots.

    A longer sample gets a micro-batch of its own. `share_rows`: False for a model that mixes the
    samples of a row. `recorded`, `masks`: the readers of recorded experts and of
    sampling masks.
    `device`: where micro-batches are built; default: the CPU.
    """

    def __init__(
        self,
        token_budget: int,
        *,
        share_rows: bool = True,
        recorded: RecordedExperts | None = None,
        masks: MaskReader | None = None,
        device: torch.device | None = None,
    ) -> None:
        if token_budget < 1:
            raise ConfigError(f"token_budget is {token_budget}", hint="it must be at least 1")
        self.token_budget = token_budget
        self._share_rows = share_rows
        self._recorded = recorded
        self._masks = masks or MaskReader()
        self._device = device or torch.device("cpu")

    def pack_pad_dispatch(
        self, table: BatchTable, *, keep: NDArray[np.bool_] | None = None
    ) -> MicroBatches:
        """Return the micro-batches of a batch.

        `keep`: bool[S], which rollouts to pack; default: all that have a trained token. Raises
        WireError where nothing predicts a trained token, ConfigError for prompts with images.
        """
        _check(table)
        packable = table.trained > 0
        if keep is not None:
            packable &= keep
        layouts = self._layouts(table.totals, np.flatnonzero(packable))
        return MicroBatches(table, layouts, self._device, self._recorded, self._masks)

    def _layouts(self, totals: Ints, chosen: Ints) -> list[Layout]:
        """Return the layouts of the micro-batches: the longest sample that fits is next."""
        # stable, so that the same batch gives the same micro-batches on every machine
        order = chosen[np.argsort(-totals[chosen], kind="stable")][::-1]
        sizes, rollouts = totals[order].tolist(), order.tolist()
        packed: list[int] = []
        slots: list[int] = []
        shapes: list[tuple[int, int, int, int]] = []
        while sizes:
            first, rows, width = len(packed), 0, sizes[-1]
            while sizes and (rows == 0 or (rows + 1) * width <= self.token_budget):
                rows += 1
                free = width
                while sizes and sizes[0] <= free and (self._share_rows or free == width):
                    position = bisect_right(sizes, free) - 1
                    packed.append(rollouts.pop(position))
                    slots.append(rows * width - free)
                    free -= sizes.pop(position)
            shapes.append((first, len(packed), rows, width))
        every, starts = np.array(packed, np.int64), np.array(slots, np.int64)
        return [
            Layout(every[first:end], starts[first:end], rows, width)
            for first, end, rows, width in shapes
        ]


def _check(table: BatchTable) -> None:
    for group in table.groups:
        if group.shared.multimodal:
            raise ConfigError(
                f"the prompt of group {group.gid} contains images: token ids alone are another "
                "prompt",
                hint="use a trainer of your own that reads images (trainer.loop): "
                "consumer/README.md",
            )
    unprompted = np.flatnonzero((table.prompt_lengths == 0) & (table.lengths > 0))
    masks = table.parts(table.columns("mask"), unprompted)
    unpredicted = [n for n, mask in zip(unprompted.tolist(), masks, strict=True) if mask[0]]
    if unpredicted:
        gid = table.groups[table.group[unpredicted[0]]].gid
        raise WireError(
            f"group {gid} has no prompt ids",
            hint="without a prompt, nothing predicts the first response token",
        )
