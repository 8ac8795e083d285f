"""The sampling mask: which tokens each response token was sampled from.

Top-k, top-p and the like leave some tokens, and the engine's logprobs are of these alone. A trainer
that takes its softmax over the same tokens computes the same distribution.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from buffer.errors import WireError

Ints = NDArray[np.int32]


class SamplingMask(Struct, frozen=True, eq=False):
    """`counts` int32[R]: from how many tokens each response token was sampled; `ids` names them.

    `ids` int32[sum(counts)] are those of the first response token, then of the second, and so on. A
    count of 0: sampled from the whole vocabulary, or not sampled, as a tool's tokens are.
    """

    counts: Ints
    ids: Ints

    def part(self, tokens: slice) -> SamplingMask:
        """Return the mask of some of the response tokens."""
        before = int(self.counts[: tokens.start].sum(dtype=np.int64))
        counts = self.counts[tokens]
        return SamplingMask(counts, self.ids[before : before + int(counts.sum(dtype=np.int64))])

    def problem(self, response_ids: Ints) -> str:
        """Return why this cannot be the mask of a response; "" if it can."""
        if len(self.counts) != len(response_ids):
            return f"it has {len(self.counts)} counts for {len(response_ids)} response tokens"
        if np.minimum.reduce(self.counts, initial=0) < 0:
            return "it has a negative count"
        if (total := int(self.counts.sum(dtype=np.int64))) != len(self.ids):
            return f"it has {len(self.ids)} ids, and its counts add up to {total}"
        if np.minimum.reduce(self.ids, initial=0) < 0:
            return "it has a negative id"
        found = np.flatnonzero(self.ids == np.repeat(response_ids, self.counts))
        is_missing = self.counts > 0
        is_missing[np.searchsorted(np.cumsum(self.counts, dtype=np.int64), found, "right")] = False
        if not is_missing.any():
            return ""
        at = int(is_missing.argmax())
        return (
            f"response token {at}, id {int(response_ids[at])}, is not among the "
            f"{int(self.counts[at])} tokens that it was sampled from"
        )

    # -- in a file -----------------------------------------------------------

    def packed(self) -> Ints:
        """Return the number of response tokens, the counts and the ids in one column."""
        return np.concatenate([[len(self.counts)], self.counts, self.ids], dtype="<i4")

    @classmethod
    def unpacked(cls, column: Ints, tokens: int) -> SamplingMask:
        """Return the mask in a file for the last `tokens` of its rollout. Raises ValueError.

        Tokens that were not sampled may have moved between prompt and response since.
        """
        size = int(column[0]) if len(column) else -1
        if not 0 <= size < len(column):
            raise ValueError("not a sampling mask")
        counts, missing = column[1 : 1 + size], tokens - size
        if missing < 0 and counts[:-missing].any():
            raise ValueError(f"it has {size} counts for {tokens} response tokens")
        counts = counts[-missing:] if missing < 0 else np.append(np.zeros(missing, "<i4"), counts)
        return cls(counts.astype("<i4", copy=False), column[1 + size :])


RecordedMask = SamplingMask | str | None
"""A mask, the address of its file, or None where no token has a restriction."""


def joined_masks(parts: Iterable[tuple[RecordedMask, int]]) -> RecordedMask:
    """Join the masks of parts of a response, each with its number of tokens.

    Raises WireError where a part with an address is not the last one.
    """
    masks = list(parts)
    if isinstance(masks[-1][0], str):
        return masks[-1][0]
    if any(isinstance(mask, str) for mask, _ in masks):
        raise WireError("a rollout whose sampling mask is in a file has ended, and cannot grow")
    known = [mask for mask, _ in masks if isinstance(mask, SamplingMask)]
    if not any(len(mask.ids) for mask in known):
        return None
    counts = [
        mask.counts if isinstance(mask, SamplingMask) else np.zeros(tokens, "<i4")
        for mask, tokens in masks
    ]
    ids = [mask.ids for mask in known]
    return SamplingMask(np.concatenate(counts, dtype="<i4"), np.concatenate(ids, dtype="<i4"))
