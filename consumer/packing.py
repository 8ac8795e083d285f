"""Packing: from the columns of received groups to micro-batches of a bounded number of token slots.

Samples are laid into rows, longest first; a row holds as many as fit (first fit decreasing), each with
positions that start again at 0. Given no attention mask, transformers 5 sees the restarts and keeps attention
inside each sample. A row's unused end continues the positions of its last sample: it comes after everything
that is used, so causal attention never looks at it.

Why not one long row per micro-batch: without a variable-length kernel its attention costs the square of the
whole batch. Rows are as wide as their longest sample, so attention costs what right-padding costs and next to
no slot is wasted; where all samples are about as long (short answers), no row holds two, and the fast causal
path is taken.

Invariant: every response token that is kept appears in exactly one micro-batch, with the logprob, mask and
advantage of its own rollout. All work on tokens is numpy on whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from consumer.recorded_experts import RecordedExperts
from consumer.shares import balanced_shares

Ints = NDArray[np.int64]
INT, FLOAT = torch.int64, torch.float32


class GroupColumns(Protocol):
    """What packing reads of a `buffer.group.RolloutGroup`."""

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
    def scores(self) -> NDArray[np.float32]: ...
    @property
    def multimodal(self) -> Sequence[object]: ...

    def experts(self) -> list[NDArray[np.int16] | str | None]: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: R rows of W slots that hold S samples with N response tokens in all.

    The logits at `logit_index` (flat slots, `row * W + column`) predict `targets`.
    """

    input_ids: torch.Tensor  # int64[R, W]; 0 in unused slots
    position_ids: torch.Tensor  # int64[R, W]
    logit_index: torch.Tensor  # int64[N]
    targets: torch.Tensor  # int64[N]
    rollout_logprobs: torch.Tensor  # float32[N]
    mask: torch.Tensor  # float32[N]; 1 = trained
    sample: torch.Tensor  # int64[N]; index into the two below
    rollout: torch.Tensor  # int64[S]; which one of the batch, in the order of groups and rollouts
    advantages: torch.Tensor  # float32[S]
    trained_tokens: torch.Tensor  # float32[S]; sum of the sample's mask
    experts: torch.Tensor | None = None  # int16[R * W, layers, top_k]: those that the engine chose; -1: none known

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(**{name: column.to(device) for name, column in columns.items() if column is not None})

    def numbered_from(self, first: int) -> MicroBatch:
        """The same, of rollouts whose numbers begin there."""
        return replace(self, rollout=self.rollout + first)


class Packer:
    """Packs groups into micro-batches of at most `token_budget` slots; a longer sample gets its own.

    `share_rows`: off for a model that does not keep samples of one row apart (`consumer.row_sharing`). `recorded`: the
    experts that were chosen go with the tokens.
    """

    def __init__(
        self, token_budget: int, *, share_rows: bool = True, recorded: RecordedExperts | None = None
    ) -> None:
        if token_budget < 1:
            raise ConfigError(f"token_budget is {token_budget}", hint="it must be at least 1")
        self.token_budget, self._share_rows, self._recorded = token_budget, share_rows, recorded

    def pack(
        self,
        groups: Sequence[GroupColumns],
        advantages: NDArray[np.float32],
        *,
        keep: NDArray[np.bool_] | None = None,
    ) -> list[MicroBatch]:
        """`advantages` float32[sum k] in the order of groups and rollouts; `keep` bool[sum k], default all.

        Rollouts without a response token are left out: they have nothing to train. Raises WireError where a
        group's columns disagree or it has no prompt, ConfigError where its prompt is more than text.
        """
        samples = _Samples.gather(groups, advantages)
        wanted = samples.lengths > 0
        if keep is not None:
            wanted &= keep
        order = _longest_first(samples.totals, np.flatnonzero(wanted))
        return [self._build(samples, *placed) for placed in self._place(samples.totals, order)]

    def pack_pad_dispatch(
        self,
        groups: Sequence[GroupColumns],
        *,
        ranks: int = 1,
        rank: int = 0,
        keep: NDArray[np.bool_] | None = None,
    ) -> list[MicroBatch]:
        """The micro-batches of one rank, of a batch that all ranks hold; without advantages, which are not known yet.

        Rollouts are dealt out by their tokens (`balanced_shares`), and every rank gets as many micro-batches, at the
        end empty ones: with sharded weights, all take part in every forward pass. Rollouts without a trained token are
        left out. `rollout` numbers those of the batch.
        """
        columns = _Samples.gather(groups, np.zeros(sum(len(group.lengths) for group in groups), np.float32))
        wanted = (columns.trained > 0) & (True if keep is None else keep)
        chosen = np.flatnonzero(wanted)
        shares = [chosen[share] for share in balanced_shares(columns.totals[chosen].tolist(), ranks)]
        plans = [list(self._place(columns.totals, _longest_first(columns.totals, share))) for share in shares]
        own = [self._build(columns, *placed) for placed in plans[rank]]
        return self.pad(own, max(len(plan) for plan in plans))

    @staticmethod
    def pad(batches: list[MicroBatch], count: int) -> list[MicroBatch]:
        """With so many empty micro-batches behind them that there are `count`."""
        return batches + [_nothing() for _ in range(count - len(batches))]

    def _place(self, totals: Ints, order: Ints) -> Iterator[tuple[Ints, Ints, int, int]]:
        """Yields (samples, first slot of each, rows, width), first fit decreasing."""
        while len(order):
            width = int(totals[order[0]])
            free = np.full(max(1, self.token_budget // width), width)
            slots = np.full(len(order), -1)
            for place, sample in enumerate(order):
                row = int(np.argmax(free >= totals[sample]))
                if free[row] >= totals[sample]:
                    slots[place] = row * width + width - free[row]
                    free[row] -= totals[sample] if self._share_rows else width
            here = slots >= 0
            yield order[here], slots[here], int((free < width).sum()), width
            order = order[~here]

    def _build(self, samples: _Samples, chosen: Ints, slots: Ints, rows: int, width: int) -> MicroBatch:
        prompts, lengths = samples.prompt_lengths[chosen], samples.lengths[chosen]
        totals = prompts + lengths
        prompt_source = _ranges(samples.prompt_starts[chosen], prompts)
        source = _ranges(samples.starts[chosen], lengths)
        input_ids = np.zeros(rows * width, np.int64)
        input_ids[_ranges(slots, prompts)] = samples.prompt_ids[prompt_source]
        input_ids[_ranges(slots + prompts, lengths)] = samples.response_ids[source]
        mask = samples.mask[source].astype(np.float32)
        owner = np.repeat(np.arange(len(chosen)), lengths)
        columns: dict[str, NDArray[Any]] = {
            "input_ids": input_ids.reshape(rows, width),
            "position_ids": _positions(slots, totals, rows, width),
            "logit_index": _ranges(slots + prompts - 1, lengths),
            "targets": samples.response_ids[source].astype(np.int64),
            "rollout_logprobs": samples.logprobs[source].astype(np.float32),
            "mask": mask,
            "sample": owner,
            "rollout": chosen.astype(np.int64),
            "advantages": samples.advantages[chosen].astype(np.float32),
            "trained_tokens": np.bincount(owner, mask, len(chosen)).astype(np.float32),
        }
        if self._recorded:
            experts = (samples.experts[sample] for sample in chosen.tolist())
            columns["experts"] = self._recorded.of_slots(experts, slots, totals, rows * width)
        return MicroBatch(**{name: torch.from_numpy(column) for name, column in columns.items()})


@dataclass(frozen=True, slots=True)
class _Samples:
    """All rollouts of a batch: the groups' columns one behind the other, and where each rollout lies."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.uint8]
    advantages: NDArray[np.float32]
    prompt_starts: Ints
    prompt_lengths: Ints
    starts: Ints
    lengths: Ints
    experts: list[NDArray[np.int16] | str | None]

    @property
    def totals(self) -> Ints:
        """Tokens of prompt and response, int64[S]."""
        return self.prompt_lengths + self.lengths

    @property
    def trained(self) -> Ints:
        """Trained tokens of each, int64[S]."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.mask, dtype=np.int64)])
        counts: Ints = before[self.starts + self.lengths] - before[self.starts]
        return counts

    @classmethod
    def gather(cls, groups: Sequence[GroupColumns], advantages: NDArray[np.float32]) -> _Samples:
        for group in groups:
            _check(group)
        members = np.array([len(g.lengths) for g in groups], np.int64)
        if len(advantages) != members.sum():
            raise WireError(f"{len(advantages)} advantages for {members.sum()} rollouts")
        prompt_lengths = np.array([len(g.prompt_ids) for g in groups], np.int64)
        lengths = _concatenate([g.lengths for g in groups], np.int64)
        return cls(
            prompt_ids=_concatenate([g.prompt_ids for g in groups], np.int32),
            response_ids=_concatenate([g.response_ids for g in groups], np.int32),
            logprobs=_concatenate([g.logprobs for g in groups], np.float32),
            mask=_concatenate([g.mask for g in groups], np.uint8),
            advantages=advantages,
            prompt_starts=np.repeat(_starts(prompt_lengths), members),
            prompt_lengths=np.repeat(prompt_lengths, members),
            starts=_starts(lengths),
            lengths=lengths,
            experts=[experts for group in groups for experts in group.experts()],
        )


def _longest_first(totals: Ints, chosen: Ints) -> Ints:
    # Stable, so that the same batch gives the same micro-batches on every machine.
    order: Ints = chosen[np.argsort(-totals[chosen], kind="stable")]
    return order


def _nothing() -> MicroBatch:
    """One slot that nothing is computed of: N = S = 0."""
    slot, index, column = (torch.zeros(shape, dtype=kind) for shape, kind in (((1, 1), INT), (0, INT), (0, FLOAT)))
    return MicroBatch(slot, slot, index, index, column, column, index, index, column, column)


def _check(group: GroupColumns) -> None:
    if group.multimodal:
        hint = "a trainer of yours (trainer.loop) reads them: see consumer/README.md"
        raise ConfigError(f"group {group.gid} shows images, and token ids alone are another prompt", hint=hint)
    if not len(group.prompt_ids):
        raise WireError(f"group {group.gid} has no prompt ids", hint="nothing predicts its first response token")
    tokens = int(group.lengths.sum())
    found = {n: len(getattr(group, n)) for n in ("response_ids", "logprobs", "mask")}
    if wrong := {name: size for name, size in found.items() if size != tokens}:
        raise WireError(f"group {group.gid}: lengths add up to {tokens} tokens, but {wrong}")


def _positions(slots: Ints, totals: Ints, rows: int, width: int) -> Ints:
    # A sample owns the slots up to the next one, so that an unused end is no new sample to transformers.
    start = np.zeros(rows * width, np.int64)
    start[slots] = slots
    position: Ints = np.arange(rows * width) - np.maximum.accumulate(start)
    return position.reshape(rows, width)


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """`arange(start, start + length)` of every pair, one behind the other."""
    ranges: Ints = np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())
    return ranges


def _starts(lengths: Ints) -> Ints:
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


def _concatenate(columns: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.asarray(c, dtype) for c in columns]) if columns else np.empty(0, dtype)
