"""Response lengths by task, counted in buckets: what workers started, and what was trained.

Compared with each other, the two show whether a run forgets long responses (length bias).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BOUNDS = np.round(2 ** (np.arange(41) / 2)).astype(np.int64)
"""Upper bounds in tokens, each 1.4 times the one before, up to 1,048,576."""

WINDOW = 8192
"""Responses after which older ones count half: lengths change while a model learns."""

MOST_BYTES = 4000
"""Bound of the text of a worker; tasks beyond it are left out."""

_TASK = re.compile(r"([\w.-]+)=(\d{1,15})((?: \d{1,9}){1,42})", re.ASCII)


@dataclass(slots=True)
class Lengths:
    """Lengths of responses in tokens: their sum, and how many are in each bucket."""

    tokens: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BOUNDS) + 1, np.int64))

    def add(self, lengths: NDArray[np.int32] | list[int], window: int) -> None:
        if self.count > window:
            self.tokens //= 2
            self.counts //= 2
        places = np.searchsorted(BOUNDS, lengths)
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.tokens += int(np.sum(lengths))

    def join(self, other: Lengths) -> None:
        self.tokens += other.tokens
        self.counts += other.counts

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.count)

    def bucket(self, share: float) -> int:
        """Return the bucket of a quantile."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.count))

    def quantile(self, share: float) -> int:
        """Return the upper bound of a quantile's bucket, in tokens."""
        return int(BOUNDS[min(self.bucket(share), len(BOUNDS) - 1)])

    def share_from(self, bucket: int) -> float:
        """Return the share of responses in this bucket and above."""
        return float(self.counts[bucket:].sum()) / max(1, self.count)


class LengthCounts(dict[str, Lengths]):
    """`Lengths` by task. One thread adds; others may read."""

    def add(
        self, task: str, lengths: NDArray[np.int32] | list[int], beside: LengthCounts | None = None
    ) -> None:
        """Add lengths, and remember as many of a task as `beside` does.

        A fleet remembers a window per worker: lengths that change with the model would look like a
        bias if one of the two reached further back.
        """
        window = beside[task].count if beside and task in beside else 0
        self.setdefault(task, Lengths()).add(lengths, max(WINDOW, window))

    def text(self) -> str:
        """Return "task=sum count count …;…" without the empty buckets at the end."""
        parts: list[str] = []
        # a list first: another thread may add a task
        for task, each in sorted([*self.items()], key=lambda item: -item[1].count):
            counts = " ".join(map(str, np.trim_zeros(each.counts, "b").tolist()))
            part = f"{task}={each.tokens} {counts}"
            if sum(map(len, parts)) + len(parts) + len(part) > MOST_BYTES:
                break
            parts.append(part)
        return ";".join(parts)

    @classmethod
    def joined(cls, texts: Iterable[str], times: float = 1.0) -> LengthCounts:
        """Return the sum of texts, `times` as much; what is malformed counts as missing."""
        found = cls()
        for part in (part for text in texts for part in text.split(";")):
            if match := _TASK.fullmatch(part):
                lengths = Lengths(int(match[2]))
                counts = match[3].split()
                lengths.counts[: len(counts)] = list(map(int, counts))
                found.setdefault(match[1], Lengths()).join(lengths)
        for lengths in found.values():
            lengths.tokens = round(lengths.tokens * times)
            lengths.counts = np.round(lengths.counts * times).astype(np.int64)
        return found


def length_bias(trained: Mapping[str, Lengths], started: Mapping[str, Lengths]) -> dict[str, float]:
    """Return metrics of each task with both, in tokens and as ratios (1: unbiased).

    `length_bias/mean` is the mean trained length over the mean started one, `/tail` the share of
    trained responses from the started p95 up over the share of started ones.
    """
    metrics: dict[str, float] = {}
    for task in sorted(trained.keys() & started.keys()):
        own, all_of_them = trained[task], started[task]
        if not own.count or not all_of_them.tokens:
            continue
        tail = all_of_them.bucket(0.95)
        metrics |= {
            f"length_bias/mean/{task}": own.mean / all_of_them.mean,
            f"length_bias/tail/{task}": own.share_from(tail) / all_of_them.share_from(tail),
            f"started_len/mean/{task}": all_of_them.mean,
            f"started_len/p95/{task}": float(all_of_them.quantile(0.95)),
            f"trained_len/mean/{task}": own.mean,
            f"trained_len/p95/{task}": float(own.quantile(0.95)),
        }
    return metrics
