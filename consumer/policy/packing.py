"""Packing: from the table of a batch to micro-batches of a bounded number of token slots.

Samples are assigned to rows, longest first; a row holds as many as fit (first fit decreasing). The
positions of each sample start at 0. When no attention mask is given, transformers 5 detects these
restarts and keeps attention inside each sample. The unused end of a row continues the positions of
its last sample. It follows all used slots, so causal attention never reads it.

Why a micro-batch is not one long row: without a variable-length kernel, attention over one row
costs the square of the whole micro-batch. Rows here are as wide as their longest sample, so
attention costs as much as with right padding, and few slots are wasted. Where all samples have
about the same length (short answers), no row holds two samples, and the fast causal path is taken.

Invariant: every kept response token is in exactly one micro-batch, with the logprob and the mask of
its own rollout. All work on tokens is numpy on whole columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from buffer.rollouts.batch_table import BatchTable, Ints, ranges
from consumer.policy.routing_replay import RecordedExperts
from consumer.ranks import balanced_shares

Experts = NDArray[np.int16] | str | None
"""The recorded experts of a rollout, as `RolloutState` has them."""

INT = torch.int64
FLOAT = torch.float32


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Hold one forward pass: R rows of W slots with S samples and N response tokens in total.

    The logits at `logit_index` (flat slots, `row * W + column`) predict `targets`.

        hidden = model(input_ids=batch.input_ids, position_ids=batch.position_ids)
        logits = head(hidden.flatten(0, 1)[batch.logit_index])    # float[N, vocabulary]
    """

    input_ids: torch.Tensor  # int64[R, W]; 0 in unused slots
    position_ids: torch.Tensor  # int64[R, W]
    logit_index: torch.Tensor  # int64[N]
    targets: torch.Tensor  # int64[N]
    rollout_logprobs: torch.Tensor  # float32[N]
    mask: torch.Tensor  # float32[N]; 1 = trained
    sample: torch.Tensor  # int64[N]; index into the two columns below
    rollout: torch.Tensor  # int64[S]; index of the rollout in the batch, in order of the groups
    trained_tokens: torch.Tensor  # float32[S]; sum of the sample's mask
    experts: torch.Tensor | None = None
    """int16[R * W, layers, top_k]: the experts that the engine chose; -1 where none are recorded"""
    optional: dict[str, torch.Tensor] = field(default_factory=dict)
    """float32[N] each: the columns of `RolloutGroup.optional_columns`; read them with `column`"""

    def column(self, name: str) -> torch.Tensor:
        """Return an optional column of the batch, such as "token_rewards", float32[N].

        nan for the tokens of a rollout without.
        """
        found = self.optional.get(name)
        return torch.full_like(self.rollout_logprobs, torch.nan) if found is None else found

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on another device."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "optional"}
        moved = {name: column.to(device) for name, column in columns.items() if column is not None}
        optional = {name: column.to(device) for name, column in self.optional.items()}
        return MicroBatch(**moved, optional=optional)


class Packer:
    """Pack rollouts into micro-batches of at most `token_budget` slots.

    A sample that is longer than the budget gets a micro-batch of its own. `share_rows`: whether a
    row may hold several samples; False for a model that mixes them (`consumer.weights.sharding`).
    `recorded`: the reader of recorded experts; if given, micro-batches contain `experts`.

        packer = Packer(8192)
        batches = packer.pack_pad_dispatch(batch.table)
    """

    def __init__(
        self,
        token_budget: int,
        *,
        share_rows: bool = True,
        recorded: RecordedExperts | None = None,
    ) -> None:
        if token_budget < 1:
            raise ConfigError(f"token_budget is {token_budget}", hint="it must be at least 1")
        self.token_budget = token_budget
        self._share_rows = share_rows
        self._recorded = recorded

    def pack_pad_dispatch(
        self,
        table: BatchTable,
        *,
        ranks: int = 1,
        rank: int = 0,
        keep: NDArray[np.bool_] | None = None,
    ) -> list[MicroBatch]:
        """Return the micro-batches of one rank, of a batch that all ranks hold.

        `keep`: bool[S], which rollouts to pack; default: all. Rollouts without a trained token are
        always left out. Rollouts are distributed by their tokens (`balanced_shares`). Every
        rank gets the same number of micro-batches, the last ones possibly empty: with sharded
        weights, all ranks must take part in every forward pass. `rollout` of the result holds
        indices into the whole batch.

        Raises WireError where nothing predicts a trained token, ConfigError where a prompt contains
        images.
        """
        _check(table)
        trained = table.trained
        totals = table.totals
        packable = trained > 0
        if keep is not None:
            packable &= keep
        chosen = np.flatnonzero(packable)
        plans = [
            list(self._layouts(totals, _longest_first(totals, chosen[share])))
            for share in balanced_shares(totals[chosen].tolist(), ranks)
        ]
        experts = self._experts(table)
        own = [self._build(table, layout, trained, experts) for layout in plans[rank]]
        return self.pad(own, max(len(plan) for plan in plans))

    @staticmethod
    def pad(batches: list[MicroBatch], count: int) -> list[MicroBatch]:
        """Return `count` micro-batches: the given ones, followed by empty ones."""
        return batches + [_empty_batch() for _ in range(count - len(batches))]

    def _experts(self, table: BatchTable) -> list[Experts]:
        if self._recorded is None:
            return []
        return [experts for group in table.groups for experts in group.experts()]

    def _layouts(self, totals: Ints, order: Ints) -> Iterator[_Layout]:
        """Yield the layout of one micro-batch after the other (first fit decreasing)."""
        while len(order):
            sizes = totals[order]
            width = int(sizes[0])
            rows = max(1, self.token_budget // width)
            slots = self._slots(sizes, rows, width)
            fits = slots >= 0
            used = int(slots.max()) // width + 1
            yield _Layout(order[fits], slots[fits], used, width)
            order = order[~fits]

    def _slots(self, sizes: Ints, rows: int, width: int) -> Ints:
        """Return the first slot of each sample in the micro-batch, -1 where it does not fit.

        `sizes`: descending.
        """
        slots = np.full(len(sizes), -1)
        # a row whose sample fills more than half of it can hold none of the same size
        alone = min(rows, int(np.count_nonzero(2 * sizes > width)))
        if not self._share_rows:
            alone = min(rows, len(sizes))
        slots[:alone] = np.arange(alone) * width
        if not self._share_rows:
            return slots
        free = np.full(rows, width)
        free[:alone] -= sizes[:alone]
        ascending = sizes[::-1].tolist()
        position = alone
        while True:
            # the longest of the samples behind that fits anywhere: free space only shrinks
            fitting = bisect_right(ascending, int(free.max()))
            position = max(position, len(sizes) - fitting)
            if position == len(sizes):
                return slots
            row = int(np.argmax(free >= sizes[position]))
            slots[position] = row * width + width - free[row]
            free[row] -= sizes[position]
            position += 1

    def _build(
        self, table: BatchTable, layout: _Layout, trained: Ints, experts: Sequence[Experts]
    ) -> MicroBatch:
        chosen, slots, rows, width = layout
        prompts = table.prompt_lengths[chosen]
        lengths = table.lengths[chosen]
        source = ranges(table.starts[chosen], lengths)
        place = ranges(slots + prompts, lengths)
        targets = table.response_ids[source].astype(np.int64)
        input_ids = np.zeros(rows * width, np.int64)
        prompt_source = ranges(table.prompt_starts[chosen], prompts)
        input_ids[ranges(slots, prompts)] = table.prompt_ids[prompt_source]
        input_ids[place] = targets
        # the logits of a token's predecessor predict it; a first token that nothing precedes is
        # never trained, and has its own in their stead
        logit_index = place - 1
        if not prompts.all():
            logit_index = np.maximum(logit_index, np.repeat(slots, lengths))
        columns: dict[str, NDArray[Any]] = {
            "input_ids": input_ids.reshape(rows, width),
            "position_ids": _positions(slots, rows, width),
            "logit_index": logit_index,
            "targets": targets,
            "rollout_logprobs": table.logprobs[source],
            "mask": table.mask[source].astype(np.float32),
            "sample": np.repeat(np.arange(len(chosen)), lengths),
            "rollout": chosen.astype(np.int64),
            "trained_tokens": trained[chosen].astype(np.float32),
        }
        if self._recorded:
            own = (experts[index] for index in chosen.tolist())
            totals = prompts + lengths
            columns["experts"] = self._recorded.of_slots(own, slots, totals, rows * width)
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        optional = {
            name: torch.from_numpy(column[source]) for name, column in table.optional.items()
        }
        return MicroBatch(**tensors, optional=optional)


class _Layout(NamedTuple):
    """The samples of a micro-batch, the first slot of each, and the number of rows and columns."""

    chosen: Ints
    slots: Ints
    rows: int
    width: int


def _longest_first(totals: Ints, chosen: Ints) -> Ints:
    # stable, so that the same batch gives the same micro-batches on every machine
    order: Ints = chosen[np.argsort(-totals[chosen], kind="stable")]
    return order


def _empty_batch() -> MicroBatch:
    """Return a micro-batch of one unused slot: N = S = 0."""
    slot = torch.zeros((1, 1), dtype=INT)
    index = torch.zeros(0, dtype=INT)
    column = torch.zeros(0, dtype=FLOAT)
    return MicroBatch(
        input_ids=slot,
        position_ids=slot,
        logit_index=index,
        targets=index,
        rollout_logprobs=column,
        mask=column,
        sample=index,
        rollout=index,
        trained_tokens=column,
    )


def _check(table: BatchTable) -> None:
    for group in table.groups:
        if group.multimodal:
            raise ConfigError(
                f"the prompt of group {group.gid} contains images: token ids alone are another "
                "prompt",
                hint="use a trainer of your own that reads images (trainer.loop): "
                "consumer/README.md",
            )
    unprompted = np.flatnonzero((table.prompt_lengths == 0) & (table.lengths > 0))
    unpredicted = unprompted[table.mask[table.starts[unprompted]] > 0]
    if len(unpredicted):
        gid = table.groups[int(table.group[unpredicted[0]])].gid
        raise WireError(
            f"group {gid} has no prompt ids",
            hint="without a prompt, nothing predicts the first response token",
        )


def _positions(slots: Ints, rows: int, width: int) -> Ints:
    # A sample owns the slots up to the next one: a restart in the unused end of a row would be a
    # new sample to transformers.
    starts = np.sort(slots)
    position: Ints = np.arange(rows * width)
    position -= np.repeat(starts, np.diff(starts, append=rows * width))
    return position.reshape(rows, width)
