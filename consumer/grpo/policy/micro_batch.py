"""Micro-batches: packed from the table of a batch, built one at a time when they are used.

Columns have at most four bytes per token until they are on a GPU; torch needs int64 there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.errors import ConfigError, WireError
from buffer.wire.document import layout_of
from buffer.wire.group import RolloutGroup
from consumer.grpo.policy.column_readers import ColumnReader, MaskReader, Places
from consumer.handle.batch import BatchTable, Ints


@dataclass(slots=True)
class Update:
    """The rollouts of one optimizer step that are on this rank.

    `tokens`, `samples`: divisors of the loss, summed over all ranks. `gids`: this rank's groups.
    The other columns have one float32[N] per micro-batch, and are empty until computed.
    """

    batches: MicroBatches
    tokens: float
    samples: int
    gids: Sequence[str]
    old_logprobs: list[Tensor] = field(default_factory=list)
    ref_logprobs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    returns: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)  # of the forward pass that is trained
    entropy: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    groups: Sequence[RolloutGroup]
    updates: list[Update]
    # what `TrainController` computed to pack it: of each group, per rollout or per token
    outcome: Sequence[NDArray[np.float32]] | None = None

    def scores(self, gids: Collection[str]) -> dict[str, dict[str, NDArray[np.float32]]]:
        """Return what the policy gave to response tokens as it was trained on them, by `gids`.

        `trainer`: log-probability; `entropy`; float32[R] each; nan for what was not packed.
        """
        wanted = [(n, group) for n, group in enumerate(self.groups) if group.gid in gids]
        found: dict[str, dict[str, NDArray[np.float32]]] = {group.gid: {} for _, group in wanted}
        for name, column in (("trainer", "logprobs"), ("entropy", "entropy")):
            columns = [np.empty(0, np.float32)] * len(self.groups)
            for n, group in wanted:
                columns[n] = found[group.gid][name] = np.full(len(group.mask), np.nan, np.float32)
            for update in self.updates:
                update.batches.fill(columns, getattr(update, column))
        return found

    def set_advantages(self, columns: Sequence[NDArray[np.float32]]) -> None:
        """Set the advantages of all response tokens, float32[R] of each group."""
        for update in self.updates:
            update.advantages = update.batches.per_token(columns)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: R rows of W slots with S samples and N response tokens in total.

    The logits at `logit_index` (flat slots, `row * W + column`) predict `targets`.
    """

    input_ids: Tensor  # int64[R, W]; 0 in unused slots
    position_ids: Tensor  # int64[R, W]
    logit_index: Tensor  # int64[N]
    targets: Tensor  # int64[N]
    rollout_logprobs: Tensor  # float32[N]
    mask: Tensor  # float32[N]; 1 = trained
    sample: Tensor  # int64[N]; index into the two columns below
    rollout: Tensor  # int64[S]; index of the rollout in the batch, in order of the groups
    trained_tokens: Tensor  # float32[S]; sum of the sample's mask
    # what readers made of large columns, by name (`ColumnReader.of_rollouts`)
    recorded: Mapping[str, Any] = field(default_factory=dict)
    # `RolloutGroup.optional_columns`, [N] or [N, k]
    optional: dict[str, Tensor] = field(default_factory=dict)
    tasks: Sequence[str] = ()  # of the S samples

    def column(self, name: str) -> Tensor:
        """Return an optional column, such as "token_rewards", float32[N]; nan: no value."""
        found = self.optional.get(name)
        return torch.full_like(self.rollout_logprobs, torch.nan) if found is None else found

    def other_ids(self) -> Tensor | None:
        """Return the token ids in optional columns, side by side, int64[N, sum k]; None without."""
        places = self.places_of_ids().items()
        ids = [self.optional[name].reshape(-1, own.stop - own.start) for name, own in places]
        return torch.cat(ids, 1).long() if ids else None

    def places_of_ids(self) -> dict[str, slice]:
        """Return which part of `other_ids` the ids of each optional column are, by its name."""
        names = [name for name in self.optional if layout_of(name).holds_ids]
        ends = np.cumsum([math.prod(self.optional[name].shape[1:]) for name in names]).tolist()
        return {name: slice(a, b) for name, a, b in zip(names, [0, *ends], ends, strict=False)}


class BatchLayout(NamedTuple):
    """Samples and their first slots (ascending), int64[S], and the numbers of rows and columns."""

    chosen: Ints
    slots: Ints
    rows: int
    width: int


_NONE = np.empty(0, np.int64)
EMPTY = BatchLayout(_NONE, _NONE, 1, 1)  # one unused slot: N = S = 0


class MicroBatches:
    """The plan of a rank's micro-batches; each use of one builds it anew, on the device.

    The groups of the table must not change as long as it is used.
    """

    def __init__(
        self,
        table: BatchTable,
        layouts: list[BatchLayout],
        device: torch.device,
        readers: Sequence[ColumnReader],
    ) -> None:
        self._table = table
        self._layouts = layouts
        self._device = device
        self._readers = [
            (reader, [value for group in table.groups for value in group.values_of(reader.name)])
            for reader in readers
        ]
        self._prompts = table.columns("prompt_ids")
        self._responses = table.columns("response_ids")
        names = ("logprobs", "mask", *table.optional_names())
        self._columns = {name: table.columns(name) for name in names}
        is_cpu = device.type == "cpu"
        self._integer = np.int64 if is_cpu else np.int32
        self._mask = np.float32 if is_cpu else np.uint8
        slots = max((layout.rows * layout.width for layout in layouts), default=1)
        self._counting = np.arange(slots, dtype=self._integer)

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, index: int) -> MicroBatch:
        return self._build(self._layouts[index])

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self._build, self._layouts)

    @property
    def trained_tokens(self) -> int:
        return sum(int(self._table.trained[layout.chosen].sum()) for layout in self._layouts)

    def pad(self, count: int) -> None:
        self._layouts += [EMPTY] * (count - len(self))

    def per_token(self, columns: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """Return float32[N] for every micro-batch, from float32[R] of each group."""
        parts = [self._table.parts(columns, layout.chosen) for layout in self._layouts]
        return [self._moved(_joined(own, np.float32)) for own in parts]

    def column(self, name: str) -> list[Tensor]:
        """Return an optional column for every micro-batch, float32[N]; nan: no value."""
        return self.per_token(self._table.columns(name))

    def fill(self, columns: Sequence[NDArray[np.float32]], values: Sequence[Tensor]) -> None:
        """Copy float32[N] of every micro-batch into float32[R] of each group; [0]: not of this."""
        table = self._table
        wanted = np.array([len(column) > 0 for column in columns], np.bool_)
        for layout, own in zip(self._layouts, values, strict=True):
            is_wanted = wanted[table.group[layout.chosen]]
            tokens = torch.from_numpy(np.repeat(is_wanted, table.lengths[layout.chosen]))
            # one transfer from the device for all parts
            rest = own[tokens.to(own.device)].cpu().numpy()
            for part in table.parts(columns, layout.chosen[is_wanted]):
                part[:], rest = rest[: len(part)], rest[len(part) :]

    def _build(self, layout: BatchLayout) -> MicroBatch:
        chosen = layout.chosen
        parts = {name: self._table.parts(column, chosen) for name, column in self._columns.items()}
        responses = self._table.parts(self._responses, chosen)
        slots = layout.rows * layout.width
        totals = self._table.totals[chosen]
        places = Places(responses, layout.slots, totals, slots, self._device)
        return MicroBatch(
            input_ids=self._moved(self._ids(layout, responses)).long(),
            position_ids=self._moved(self._positions(layout)).long(),
            logit_index=self._moved(self._logit_index(layout)).long(),
            targets=self._moved(_joined(responses, self._integer)).long(),
            rollout_logprobs=self._moved(_joined(parts.pop("logprobs"), np.float32)),
            mask=self._moved(_joined(parts.pop("mask"), self._mask)).float(),
            sample=self._moved(
                np.repeat(np.arange(len(chosen), dtype=self._integer), self._table.lengths[chosen])
            ).long(),
            rollout=self._moved(chosen),
            trained_tokens=self._moved(self._table.trained[chosen]).float(),
            recorded={
                reader.name: reader.of_rollouts([values[n] for n in chosen.tolist()], places)
                for reader, values in self._readers
            },
            optional={
                name: self._moved(np.concatenate(own) if own else self._columns[name][0][:0])
                for name, own in parts.items()
            },
            tasks=[self._table.groups[n].task for n in self._table.group[chosen].tolist()],
        )

    def _ids(self, layout: BatchLayout, responses: Sequence[NDArray[np.int32]]) -> NDArray[Any]:
        """Return int[R, W]."""
        chosen, slots, rows, width = layout
        ids = np.zeros(rows * width, self._integer)
        groups = self._table.group[chosen].tolist()
        for slot, group, response in zip(slots.tolist(), groups, responses, strict=True):
            prompt = self._prompts[group]
            start = slot + len(prompt)
            ids[slot:start] = prompt
            ids[start : start + len(response)] = response
        return ids.reshape(rows, width)

    def _positions(self, layout: BatchLayout) -> NDArray[Any]:
        """Return the position of every slot in its sample, int[R, W].

        Positions continue to the next sample: transformers takes a restart for a new sample.
        """
        _, slots, rows, width = layout
        starts = slots if len(slots) else np.zeros(1, np.int64)
        owned = np.append(starts[1:], rows * width) - starts
        return self._counted(np.zeros(len(owned), np.int64), owned).reshape(rows, width)

    def _logit_index(self, layout: BatchLayout) -> NDArray[Any]:
        """Return the slot whose logits predict each token: that of its predecessor, int[N]."""
        lengths = self._table.lengths[layout.chosen]
        prompts = self._table.prompt_lengths[layout.chosen]
        index = self._counted(layout.slots + prompts - 1, lengths)
        # a first token that nothing precedes is never trained; it has its own logits
        unprompted = prompts == 0
        index[(np.cumsum(lengths) - lengths)[unprompted & (lengths > 0)]] += 1
        return index

    def _counted(self, first: Ints, counts: Ints) -> NDArray[Any]:
        """Return `first[n]`, `first[n] + 1`, …, `counts[n]` of them, for every n."""
        before = np.cumsum(counts) - counts
        counted: NDArray[Any] = np.repeat((first - before).astype(self._integer), counts)
        counted += self._counting[: len(counted)]
        return counted

    def _moved(self, column: NDArray[Any]) -> Tensor:
        return torch.from_numpy(column).to(self._device)


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype)


class Packer:
    """Packs rollouts into micro-batches of at most `token_budget` slots.

    Rows take samples first fit decreasing, and are as wide as their longest sample: without a
    variable-length kernel, attention costs the square of a row. Invariant: every kept response
    token is in exactly one micro-batch, with its rollout's logprob and mask.

    A longer sample gets a micro-batch of its own. `share_rows`: False for a model that mixes the
    samples of a row. `readers`: of large columns.
    `device`: where micro-batches are built; default: the CPU.
    """

    def __init__(
        self,
        token_budget: int,
        *,
        share_rows: bool = True,
        readers: Sequence[ColumnReader] = (MaskReader(),),
        device: torch.device | None = None,
    ) -> None:
        if token_budget < 1:
            raise ConfigError(f"token_budget is {token_budget}", hint="it must be at least 1")
        self.token_budget = token_budget
        self._share_rows = share_rows
        self._readers = readers
        self._device = device or torch.device("cpu")

    def pack_pad_dispatch(
        self, table: BatchTable, *, keep: NDArray[np.bool_] | None = None
    ) -> MicroBatches:
        """Return the micro-batches of a batch.

        `keep`: bool[S], which rollouts to pack; default: all that have a trained token. Raises
        WireError where nothing predicts a trained token, ConfigError for prompts with images.
        """
        _check(table)
        packable = table.trained > 0 if keep is None else keep & (table.lengths > 0)
        layouts = self._layouts(table.totals, np.flatnonzero(packable))
        return MicroBatches(table, layouts, self._device, self._readers)

    def _layouts(self, totals: Ints, chosen: Ints) -> list[BatchLayout]:
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
            BatchLayout(every[first:end], starts[first:end], rows, width)
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
