"""How the values of one train step are distributed, in at most 32 numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

MOST_BINS = 32
LARGEST = 1e30  # values beyond it, and what is not finite, are left out


@dataclass(frozen=True, slots=True)
class StepHistogram:
    """`counts[n]` values lie in [(first + n) * width, (first + n + 1) * width).

    The width is a power of two, so bins of several steps lie in one grid.
    """

    width: float
    first: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[Any], finest: float = 0.0) -> Self | None:
        """Return the histogram of these; None without values. `finest`: the smallest width."""
        found = np.asarray(values, np.float64)
        found = found[np.abs(found) < LARGEST]
        if not len(found):
            return None
        low, high = float(found.min()), float(found.max())
        # the span of values that are all equal is a share of them
        span = max(high - low, 2.0**-20 * max(abs(low), abs(high), 1.0))
        width = max(2.0 ** math.ceil(math.log2(span / (MOST_BINS - 1))), finest)
        places = np.floor(found / width).astype(np.int64)
        first = int(places.min())
        return cls(width, first, tuple(np.bincount(places - first).tolist()))

    @classmethod
    def parse(cls, document: Any) -> Self | None:
        """Return the histogram of a decoded JSON object; None where it is none."""
        match document:
            case {"width": float() | int() as width, "first": int() as first, "counts": [*counts]}:
                is_counted = all(isinstance(n, int) and n >= 0 for n in counts)
                if 0 < width < LARGEST and 0 < len(counts) <= MOST_BINS and is_counted:
                    return cls(float(width), first, tuple(counts))
        return None

    def document(self) -> dict[str, Any]:
        return asdict(self)
