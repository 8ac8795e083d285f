"""The batches of a run as a torch dataset; `map(padded_tensors, dataset)` yields tensors instead.

dataset = BatchDataset(consumer, {"math": 16}, first=position.step + 1, last=100)
for batch in DataLoader(dataset, batch_size=None):   # whole batches: the run sets their size
    train(batch)
    consumer.commit(batch.step, keep=batch.step)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from buffer.errors import ConfigError
from consumer.handle.batch import Batch, ranges

# Groups of each task, or a function of the step that returns them,
# such as `lambda step: run.limits.mix().shares(step)`.
Counts = Mapping[str, int] | Callable[[int], Mapping[str, int]]


class TakesBatches(Protocol):
    """A `RolloutConsumer`, or the `ShardedConsumer` of a data-parallel trainer."""

    def take_batch(self, step: int, counts: Mapping[str, int]) -> Batch:
        """Return the batch of a step."""


class BatchDataset(IterableDataset[Batch]):
    """Iterates over the batches of steps `first` to `last`, and blocks until each is ready."""

    def __init__(
        self, consumer: TakesBatches, counts: Counts, *, first: int = 1, last: int
    ) -> None:
        super().__init__()
        self._consumer = consumer
        self._counts = counts
        self._first = first
        self._last = last

    def __len__(self) -> int:
        return max(0, self._last - self._first + 1)

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ConfigError(
                "batches cannot be taken in a worker process of a DataLoader: only one process "
                "is the trainer of a run",
                hint="set num_workers=0; the consumer reads the next batch ahead by itself",
            )
        for step in range(self._first, self._last + 1):
            counts = self._counts(step) if callable(self._counts) else self._counts
            yield self._consumer.take_batch(step, counts)


def padded_tensors(batch: Batch) -> dict[str, Tensor]:
    """Return the rollouts of a batch as right-padded rows: S rollouts of at most L tokens.

    input_ids int64[S, L]: prompt and response; attention_mask int64[S, L]; loss_mask float32[S, L]:
    1 for each trained token; logprobs float32[S, L]: of response tokens when sampled (0 elsewhere);
    scores float32[S]; group int64[S]: position of the prompt in the batch.
    """
    table = batch.table
    prompts = table.prompt_lengths
    totals = table.totals
    position = np.arange(totals.max(initial=0))
    is_token = position < totals[:, None]
    is_response = is_token & (position >= prompts[:, None])
    ids = np.zeros(is_token.shape, np.int64)
    ids[is_response] = table.response_ids
    ids[is_token & ~is_response] = table.prompt_ids[ranges(table.prompt_starts, prompts)]
    mask = np.zeros(ids.shape, np.float32)
    logprobs = np.zeros(ids.shape, np.float32)
    mask[is_response] = table.mask
    logprobs[is_response] = table.logprobs
    columns = {
        "input_ids": ids,
        "attention_mask": is_token.astype(np.int64),
        "loss_mask": mask,
        "logprobs": logprobs,
        "scores": table.scores,
        "group": table.group,
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}
