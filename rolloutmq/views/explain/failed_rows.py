"""Compare the prompts of a task's dead letters with those of its other groups in the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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


def failed_rows(run: Run, task: str) -> tuple[str, bool] | None:
    """Return how the prompts differ, and whether the model's data is biased by that.

    None with too few groups of either kind. Raises StoreError.
    """
    letters = islice(run.dead_letters.newest(), MOST_LETTERS)
    dead = (letter.gid for letter in letters if letter.task == task)
    alive = run.groups.find({"task": task, "stage": {"$ne": "dead"}}, limit=MOST)
    failed = list(_prompts(run, dead))
    others = list(_prompts(run, (record.gid for record in alive)))
    if min(len(failed), len(others)) < FEWEST:
        return None
    lengths, is_biased = _lengths(failed, others)
    sources, is_one_source = _sources(failed, others)
    return lengths + sources, is_biased or is_one_source


def _prompts(run: Run, gids: Iterable[str]) -> Iterator[RolloutGroup]:
    for gid in islice(gids, MOST):
        try:
            yield run.buffer.read(PayloadRef(gid, "init", 1, 0, ""))
        except (PayloadMissing, WireError):  # ended since, or put without a prompt
            continue


def _lengths(failed: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> tuple[str, bool]:
    """Compare lengths, in tokens if all prompts have them, else in characters."""
    has_tokens = all(len(prompt.prompt_ids) for prompt in (*failed, *others))
    measure, unit = (_tokens, "tokens") if has_tokens else (_characters, "characters")
    quartiles = [
        [int(n) for n in np.percentile([measure(prompt) for prompt in prompts], (25, 50, 75))]
        for prompts in (failed, others)
    ]
    words = [" / ".join(map(str, each)) for each in quartiles]
    low, high = sorted(max(1, median) for _, median, _ in quartiles)
    said = f"its failed prompts have {words[0]} {unit} (quartiles), others {words[1]}"
    return said, high / low > LENGTH_RATIO


def _tokens(prompt: RolloutGroup) -> int:
    return len(prompt.prompt_ids)


def _characters(prompt: RolloutGroup) -> int:
    return sum(len(str(message.get("content", ""))) for message in prompt.shared.messages)


def _sources(failed: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> tuple[str, bool]:
    """Compare the shares of the data source that is most typical of the failed prompts."""
    counts = [
        Counter(each.shared.data_source or "" for each in prompts) for prompts in (failed, others)
    ]
    if len(counts[0] + counts[1]) < 2:
        return "", False

    def share(place: int, source: str) -> float:
        return counts[place][source] / counts[place].total()

    source = max(counts[0], key=lambda name: share(0, name) - share(1, name))
    failed_share, other_share = share(0, source), share(1, source)
    named = source or "no source"
    said = f"; {failed_share:.0%} of them are of {named!r}, of the others {other_share:.0%}"
    return said, failed_share - other_share > SOURCE_DIFFERENCE
