"""Packing: from the columns of received groups to micro-batches of a bounded number of token slots.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from consumer.ranks import balanced_shares
from consumer.training.routing_replay import RecordedExperts

Ints = NDArray[np.int64]
INT = torch.int64
FLOAT = torch.float32


class GroupColumns(Protocol):
    """The columns of a `buffer.rollouts.group.RolloutGroup` that packing reads.

    Any object with these attributes can be packed:

        batches = Packer(8192).pack_pad_dispatch(groups)    # groups: Sequence[GroupColumns]
    """

    @property
    def gid(self) -> str: ...
    @property
    def prompt_ids(self) -> NDArray[np.int32]: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def response_ids(self) -> NDArray[np.int32]: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def mask(self) -> NDArray[np.uint8]: ...
    @property
    def multimodal(self) -> Sequence[object]: ...

    def experts(self) -> list[NDArray[np.int16] | str | None]: ...


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

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on another device."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        present = {name: column for name, column in columns.items() if column is not None}
        return MicroBatch(**{name: column.to(device) for name, column in present.items()})

    def numbered_from(self, first: int) -> MicroBatch:
        """Return the micro-batch with `first` added to the indices in `rollout`."""
        return replace(self, rollout=self.rollout + first)


class Packer:
    """Pack groups into micro-batches of at most `token_budget` slots.

    A sample that is longer than the budget gets a micro-batch of its own. `share_rows`: whether a
    row may hold several samples; False for a model that mixes them (`consumer.training.sharding`).
    `recorded`: the reader of recorded experts; if given, micro-batches contain `experts`.

        packer = Packer(8192)
        batches = packer.pack_pad_dispatch(groups)
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
        groups: Sequence[GroupColumns],
        *,
        ranks: int = 1,
        rank: int = 0,
        keep: NDArray[np.bool_] | None = None,
    ) -> list[MicroBatch]:
        """Return the micro-batches of one rank, of a batch that all ranks hold.

        `keep`: bool[sum k], which rollouts to pack; default: all. Rollouts without a trained token
        are always left out. Rollouts are distributed by their tokens (`balanced_shares`). Every
        rank gets the same number of micro-batches, the last ones possibly empty: with sharded
        weights, all ranks must take part in every forward pass. `rollout` of the result holds
        indices into the whole batch.

        Raises WireError where the columns of a group disagree or nothing predicts a trained token,
        ConfigError where its prompt contains images.
        """
        samples = _Samples.gather(groups)
        packable = samples.trained > 0
        if keep is not None:
            packable &= keep
        chosen = np.flatnonzero(packable)
        plans = [
            list(self._layouts(samples.totals, _longest_first(samples.totals, chosen[share])))
            for share in balanced_shares(samples.totals[chosen].tolist(), ranks)
        ]
        own = [self._build(samples, layout) for layout in plans[rank]]
        return self.pad(own, max(len(plan) for plan in plans))

    @staticmethod
    def pad(batches: list[MicroBatch], count: int) -> list[MicroBatch]:
        """Return `count` micro-batches: the given ones, followed by empty ones."""
        return batches + [_empty_batch() for _ in range(count - len(batches))]

    def _layouts(self, totals: Ints, order: Ints) -> Iterator[_Layout]:
        """Yield the layout of one micro-batch after the other (first fit decreasing)."""
        while len(order):
            width = int(totals[order[0]])
            free = np.full(max(1, self.token_budget // width), width)
            slots = np.full(len(order), -1)
            for position, sample in enumerate(order):
                row = int(np.argmax(free >= totals[sample]))
                if free[row] >= totals[sample]:
                    slots[position] = row * width + width - free[row]
                    free[row] -= totals[sample] if self._share_rows else width
            fits = slots >= 0
            yield _Layout(order[fits], slots[fits], int((free < width).sum()), width)
            order = order[~fits]

    def _build(self, samples: _Samples, layout: _Layout) -> MicroBatch:
        chosen, slots, rows, width = layout
        prompts = samples.prompt_lengths[chosen]
        lengths = samples.lengths[chosen]
        totals = prompts + lengths
        source = _ranges(samples.starts[chosen], lengths)
        prompt_source = _ranges(samples.prompt_starts[chosen], prompts)
        input_ids = np.zeros(rows * width, np.int64)
        input_ids[_ranges(slots, prompts)] = samples.prompt_ids[prompt_source]
        input_ids[_ranges(slots + prompts, lengths)] = samples.response_ids[source]
        mask = samples.mask[source].astype(np.float32)
        sample = np.repeat(np.arange(len(chosen)), lengths)
        # the logits of a token's predecessor predict it; a first token that nothing precedes is
        # never trained, and has its own in their stead
        logit_index = np.maximum(_ranges(slots + prompts - 1, lengths), np.repeat(slots, lengths))
        columns: dict[str, NDArray[Any]] = {
            "input_ids": input_ids.reshape(rows, width),
            "position_ids": _positions(slots, rows, width),
            "logit_index": logit_index,
            "targets": samples.response_ids[source].astype(np.int64),
            "rollout_logprobs": samples.logprobs[source].astype(np.float32),
            "mask": mask,
            "sample": sample,
            "rollout": chosen.astype(np.int64),
            "trained_tokens": np.bincount(sample, mask, len(chosen)).astype(np.float32),
        }
        if self._recorded:
            experts = (samples.experts[index] for index in chosen.tolist())
            columns["experts"] = self._recorded.of_slots(experts, slots, totals, rows * width)
        return MicroBatch(**{name: torch.from_numpy(column) for name, column in columns.items()})


class _Layout(NamedTuple):
    """The samples of a micro-batch, the first slot of each, and the number of rows and columns."""

    chosen: Ints
    slots: Ints
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class _Samples:
    """All S rollouts of a batch: the concatenated columns of the groups, and offsets into them."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.uint8]
    prompt_starts: Ints
    prompt_lengths: Ints
    starts: Ints
    lengths: Ints
    experts: list[NDArray[np.int16] | str | None]

    @property
    def totals(self) -> Ints:
        """Return the number of tokens of prompt and response of each sample, int64[S]."""
        return self.prompt_lengths + self.lengths

    @property
    def trained(self) -> Ints:
        """Return the number of trained tokens of each sample, int64[S]."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.mask, dtype=np.int64)])
        counts: Ints = before[self.starts + self.lengths] - before[self.starts]
        return counts

    @classmethod
    def gather(cls, groups: Sequence[GroupColumns]) -> _Samples:
        for group in groups:
            _check(group)
        members = np.array([len(group.lengths) for group in groups], np.int64)
        prompt_lengths = np.array([len(group.prompt_ids) for group in groups], np.int64)
        lengths = _concatenate([group.lengths for group in groups], np.int64)
        return cls(
            prompt_ids=_concatenate([group.prompt_ids for group in groups], np.int32),
            response_ids=_concatenate([group.response_ids for group in groups], np.int32),
            logprobs=_concatenate([group.logprobs for group in groups], np.float32),
            mask=_concatenate([group.mask for group in groups], np.uint8),
            prompt_starts=np.repeat(_starts(prompt_lengths), members),
            prompt_lengths=np.repeat(prompt_lengths, members),
            starts=_starts(lengths),
            lengths=lengths,
            experts=[experts for group in groups for experts in group.experts()],
        )


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


def _check(group: GroupColumns) -> None:
    if group.multimodal:
        raise ConfigError(
            f"the prompt of group {group.gid} contains images: token ids alone are another prompt",
            hint="use a trainer of your own that reads images (trainer.loop): consumer/README.md",
        )
    tokens = int(group.lengths.sum())
    found = {name: len(getattr(group, name)) for name in ("response_ids", "logprobs", "mask")}
    wrong = {name: size for name, size in found.items() if size != tokens}
    if wrong:
        raise WireError(f"group {group.gid}: lengths add up to {tokens} tokens, but {wrong}")
    if trains_unpredicted(group):
        raise WireError(
            f"group {group.gid} has no prompt ids",
            hint="without a prompt, nothing predicts the first response token",
        )


def trains_unpredicted(group: GroupColumns) -> bool:
    """Return whether a first token is to be trained that nothing precedes.

    Sessions of a gateway may have no first token in common. Then the group has no prompt, and what
    each of its rollouts read before its first turn is in the response, with mask 0.
    """
    firsts = _starts(group.lengths)[group.lengths > 0]
    return not len(group.prompt_ids) and bool(group.mask[firsts].any())


def _positions(slots: Ints, rows: int, width: int) -> Ints:
    # A sample owns the slots up to the next one: a restart in the unused end of a row would be a
    # new sample to transformers.
    start = np.zeros(rows * width, np.int64)
    start[slots] = slots
    position: Ints = np.arange(rows * width) - np.maximum.accumulate(start)
    return position.reshape(rows, width)


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of `arange(start, start + length)` of every pair."""
    ranges: Ints = np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
    return ranges


def _starts(lengths: NDArray[np.integer[Any]]) -> Ints:
    starts: Ints = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def _concatenate(columns: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    if not columns:
        return np.empty(0, dtype)
    return np.concatenate([np.asarray(column, dtype) for column in columns])
