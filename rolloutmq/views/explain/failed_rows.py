"""Compare the prompts of a task's dead letters with those of its other groups in the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from buffer.errors import PayloadMissing, WireError
from buffer.job import PayloadRef
from buffer.run import Run
from buffer.wire.group import RolloutGroup

MOST = 32  # prompts that are read of each kind
FEWEST = 8  # below this, their quartiles say nothing
MOST_LETTERS = 1000  # dead letters of all tasks that are looked through
LENGTH_RATIO = 1.5  # medians further apart than this are a bias
SOURCE_DIFFERENCE = 0.3  # so are shares of a source


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompt lengths, in tokens or else in characters, and data sources of some groups."""

    unit: str
    lengths: list[int]
    sources: Counter[str]

    @classmethod
    def of(cls, prompts: list[RolloutGroup]) -> Rows:
        has_tokens = all(len(prompt.prompt_ids) for prompt in prompts)
        measure = _tokens if has_tokens else _characters
        sources = Counter(prompt.shared.data_source or "" for prompt in prompts)
        return cls("tokens" if has_tokens else "characters", [*map(measure, prompts)], sources)

    @property
    def quartiles(self) -> list[int]:
        return [int(n) for n in np.percentile(self.lengths, (25, 50, 75))]

    def share_of(self, source: str) -> float:
        return self.sources[source] / len(self.lengths)


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The rows of a task's newest dead letters, and of other groups."""

    failed: Rows
    others: Rows

    @property
    def source(self) -> str:
        """The data source of which the failed rows have the most, compared with the others."""
        failed, others = self.failed, self.others
        return max(failed.sources, key=lambda name: failed.share_of(name) - others.share_of(name))

    @property
    def is_biased(self) -> bool:
        medians = sorted(max(1, rows.quartiles[1]) for rows in (self.failed, self.others))
        difference = self.failed.share_of(self.source) - self.others.share_of(self.source)
        return medians[1] / medians[0] > LENGTH_RATIO or difference > SOURCE_DIFFERENCE

    def __str__(self) -> str:
        failed, others, source = self.failed, self.others, self.source
        lengths = [" / ".join(map(str, rows.quartiles)) for rows in (failed, others)]
        words = (
            f"its failed prompts have {lengths[0]} {failed.unit} (quartiles), others {lengths[1]}"
        )
        if len(failed.sources + others.sources) < 2:
            return words
        return (
            f"{words}; {failed.share_of(source):.0%} of them are of {source or 'no source'!r}, "
            f"of the others {others.share_of(source):.0%}"
        )


def failed_rows(run: Run, task: str) -> FailedRows | None:
    """Return the comparison; None with too few groups of either kind. Raises StoreError."""
    letters = islice(run.dead_letters.newest(), MOST_LETTERS)
    dead = (letter.gid for letter in letters if letter.task == task)
    alive = {"task": task, "stage": {"$ne": "dead"}}
    others = (record.gid for record in run.groups.find(alive, limit=MOST))
    failed, compared = (list(_prompts(run, gids)) for gids in (dead, others))
    if min(len(failed), len(compared)) < FEWEST:
        return None
    return FailedRows(Rows.of(failed), Rows.of(compared))


def _prompts(run: Run, gids: Iterable[str]) -> Iterator[RolloutGroup]:
    for gid in islice(gids, MOST):
        try:
            yield run.buffer.read(PayloadRef(gid, "init", 1, 0, ""))
        except (PayloadMissing, WireError):  # ended since, or put without a prompt
            continue


def _tokens(prompt: RolloutGroup) -> int:
    return len(prompt.prompt_ids)


def _characters(prompt: RolloutGroup) -> int:
    return sum(len(str(message.get("content", ""))) for message in prompt.shared.messages)
