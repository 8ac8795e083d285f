"""Adapt a torch DataLoader or any iterable to a data set, whose position is the draw (I3).

A restarted producer iterates again and skips what was drawn, so every pass must have a fixed order:
a loader's generator is seeded, `set_epoch` is called, and a loader that shuffles without a
generator is refused. Iteration begins at the first draw.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from buffer.errors import DatasetError
from producer_workers.config.dataset import LARGEST_ROW
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.records import ToProblem, make_problem

KEPT = 1024  # records that can be read again: a producer may draw more than it has room to start


class StreamDataset:
    """Row n is the n-th record of each pass. Thread-safe. Needs `len()` or `rows`."""

    def __init__(
        self,
        iterable: Iterable[Any],
        source: str,
        to_problem: ToProblem,
        *,
        seed: int = 0,
        rows: int | None = None,
        largest: int = LARGEST_ROW,
    ) -> None:
        self._iterable = iterable
        self._source = source
        self._to_problem = to_problem
        self._seed = seed
        self._largest = largest
        # the length of a DataLoader itself counts batches
        counted: Any = getattr(iterable, "dataset", iterable)
        try:
            self._rows = len(counted) if rows is None else rows
        except TypeError as error:
            hint = "give it a __len__, or set `rows` to the number of records of one pass"
            raise DatasetError(
                f"{source}: {type(counted).__name__} has no length", hint=hint
            ) from error
        shuffles = type(getattr(iterable, "sampler", None)).__name__ == "RandomSampler"
        if shuffles and getattr(iterable, "generator", None) is None:
            raise DatasetError(
                f"{source}: the loader shuffles anew each time, so a restart would skip and "
                "repeat prompts",
                hint="use DataLoader(..., generator=torch.Generator()), "
                "which is seeded by the run's seed and the epoch",
            )
        self._lock = threading.Lock()
        self._epoch = -1
        self._next = 0
        self._records: Iterator[Any] = iter(())
        self._kept: deque[Any] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return self._rows

    def row(self, row: int, epoch: int = 0) -> Problem:
        """Return record `row` of pass `epoch`; one long past costs a pass from the start."""
        if not 0 <= row < self._rows:
            raise IndexError(f"{self._source}: row {row} of {self._rows}")
        where = f"{self._source}, epoch {epoch}, record {row}"
        return make_problem(self._to_problem, partial(self._find, row, epoch), where, self._largest)

    def _find(self, row: int, epoch: int) -> Any:
        with self._lock:
            try:
                if epoch != self._epoch or row < self._next - len(self._kept):
                    self._begin(epoch)
                while self._next <= row:
                    self._kept.append(next(self._records))
                    self._next += 1
                return self._kept[row - self._next]
            except StopIteration:
                self._epoch = -1
                hint = "its length must be the number of records in every pass"
                raise DatasetError(
                    f"{self._source}: ended after {self._next} of {self._rows} records", hint=hint
                ) from None
            except BaseException:
                self._epoch = -1  # a generator that raised has ended
                raise

    def _begin(self, epoch: int) -> None:
        for part in (
            self._iterable,
            getattr(self._iterable, "sampler", None),
            getattr(self._iterable, "dataset", None),
        ):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        generator = getattr(self._iterable, "generator", None)
        if generator is not None:
            generator.manual_seed(self._seed * 1_000_003 + epoch)  # differs for each run and epoch
        self._kept.clear()
        self._epoch = epoch
        self._next = 0
        # a loader may give lists of records
        self._records = (
            record
            for item in self._iterable
            for record in (item if isinstance(item, list) else (item,))
        )
