"""What a batch contains: one row per rollout, from a batch or from a file that `export` wrote.

python -m examples.batch_columns groups.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import VersionSpan
from consumer.handle.batch import Batch


class Row(NamedTuple):
    """One rollout, as a trainer needs it."""

    gid: str
    input_ids: NDArray[np.int32]
    """prompt and response"""
    trained: NDArray[np.bool_]
    """of `input_ids`: which tokens the policy wrote and the loss may use"""
    logprobs: NDArray[np.float32]
    """of `input_ids`, at the sampling temperature; 0 where not trained"""
    versions: NDArray[np.int64]
    """of `input_ids`: the train step after which the weights were published; -1 without"""
    score: float
    staleness: int
    """of its group, for the step of the batch: 0 is on-policy"""


def rows(batch: Batch) -> Iterator[Row]:
    """Yield the rollouts of a batch, group by group."""
    table = batch.table
    spans = [found for group in batch.groups for found in group.spans()]
    for n in range(len(table)):
        entry = batch.manifest.entries[table.group[n]]
        prompt = table.prompt_ids[table.prompt_starts[n] :][: table.prompt_lengths[n]]
        part = slice(table.starts[n], table.starts[n] + table.lengths[n])
        yield _row(
            entry.gid,
            prompt,
            table.response_ids[part],
            table.mask[part],
            table.logprobs[part],
            spans[n],
            float(table.scores[n]),
            # of the oldest weights; None where no token has a version
            0 if entry.version is None else batch.step - entry.version - 1,
        )


def rows_of_lines(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rollouts of a JSONL file: `rolloutmq export groups.jsonl`."""
    for line in map(json.loads, lines):
        mask = line["response_mask"]
        yield _row(
            line["gid"],
            line["prompt_ids"],
            line["response_ids"],
            [1] * len(line["response_ids"]) if mask is None else mask,
            line["logprobs"],
            [VersionSpan(*span) for span in line["spans"]],
            line["reward"]["score"],
            line["staleness"] or 0,
        )


def _row(
    gid: str,
    prompt: Any,
    response: Any,
    mask: Any,
    logprobs: Any,
    spans: Iterable[VersionSpan],
    score: float,
    staleness: int,
) -> Row:
    nothing = np.zeros(len(prompt))
    versions = np.full(len(response), -1)
    for span in spans:
        versions[span.start : span.start + span.length] = span.version
    return Row(
        gid,
        np.concatenate([prompt, response]).astype(np.int32),
        np.concatenate([nothing, mask]).astype(bool),
        np.concatenate([nothing, logprobs]).astype(np.float32),
        np.concatenate([nothing - 1, versions]).astype(np.int64),
        score,
        staleness,
    )


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8") as file:
        for row in rows_of_lines(file):
            print(row.gid, row.score, row.staleness, int(row.trained.sum()))  # noqa: T201
