"""Read large columns of rollouts for the model's forward pass: the interface, and for masks.

With a sampling mask, the softmax is over the tokens that top-k and top-p left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.maintenance.column_files import NO_FILES, ColumnFolder
from buffer.wire.group import RolloutGroup
from buffer.wire.sampling_mask import RecordedMask, SamplingMask, joined_masks
from consumer.grpo.policy.vocabulary_projection import SampledFrom


class Places(NamedTuple):
    """Where the S rollouts of a micro-batch are."""

    responses: Sequence[NDArray[np.int32]]
    first: NDArray[np.int64]  # int64[S]: first slot
    totals: NDArray[np.int64]  # int64[S]: tokens of prompt and response
    slots: int  # of the micro-batch
    device: torch.device


class ColumnReader(Protocol):
    """Reads the column `name`, by which groups without a usable one are counted.

    `mistake`: error and hint where all groups of a batch are without.
    """

    name: str
    mistake: tuple[str, str]

    def problem(self, group: RolloutGroup) -> str:
        """Return why the column of a group cannot be used; "" if it can."""

    def of_rollouts(self, values: Sequence[Any], places: Places) -> Any:
        """Return what the forward pass needs of these rollouts; None for nothing.

        Raises WireError for a value that cannot be used.
        """


class MaskReader:
    """Reads masks of a model with `vocabulary` token ids; None: ids are not compared with it.

    `columns`: the folder with large masks. `needed`: a trained token that was sampled
    with top_p or top_k needs a set.
    """

    name = "sampling_mask"
    mistake = (
        "no group of the batch has usable sampling masks: the log has the reasons",
        "sample by [engine] kind vllm or transformers; let your own agent loop pass made.columns "
        "to state.append; or set [learner] allow_truncated_sampling = true, and the ratios are "
        "wrong",
    )

    def __init__(
        self,
        vocabulary: int | None = None,
        columns: ColumnFolder = NO_FILES,
        *,
        needed: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._columns = columns
        self._needed = needed

    def problem(self, group: RolloutGroup) -> str:
        end = 0
        rollouts = zip(
            group.values_of(self.name), group.samples, group.lengths.tolist(), strict=True
        )
        for index, (recorded, sample, length) in enumerate(rollouts):
            start, end = end, end + length
            try:
                mask = self._read(recorded, group.response_ids[start:end])
            except WireError as error:
                return f"rollout {index} {error.message}"
            whole = group.mask[start:end] > 0
            if mask:
                whole &= mask.counts == 0
            if self._needed and (cuts := sample.always_cuts()) and whole.any():
                return f"rollout {index} was sampled with {cuts}, and does not say what that left"
        return ""

    def of_rollouts(self, values: Sequence[RecordedMask], places: Places) -> SampledFrom | None:
        """Return what some rollouts were sampled from; None without any restriction.

        Raises WireError for a mask that cannot be used.
        """
        if not any(values):
            return None
        pairs = zip(values, places.responses, strict=True)
        joined = joined_masks([(self._read(mask, ids), len(ids)) for mask, ids in pairs])
        if not isinstance(joined, SamplingMask):
            return None
        columns = (torch.from_numpy(part).to(places.device) for part in (joined.counts, joined.ids))
        counts, ids = (column.long() for column in columns)
        return SampledFrom(counts, ids, np.append(0, np.cumsum(joined.counts, dtype=np.int64)))

    def _read(self, recorded: RecordedMask, response_ids: NDArray[np.int32]) -> SamplingMask | None:
        if not isinstance(recorded, str):  # masks in a payload were checked when it was read
            mask = recorded
        else:
            try:
                column = self._columns.read(recorded, "<i4", 2**28)  # in a file: 1 GiB
                mask = SamplingMask.unpacked(column.ravel(), len(response_ids))
            except (WireError, ValueError) as error:
                raise WireError(f"has a sampling mask that cannot be read: {error}") from error
            if problem := mask.problem(response_ids):
                raise WireError(f"has a sampling mask that is wrong: {problem}")
        largest = int(mask.ids.max(initial=0)) if mask else 0
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise WireError(
                f"could be sampled as id {largest}, beyond the vocabulary of {self._vocabulary}"
            )
        return mask
