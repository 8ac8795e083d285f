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
# from which the model's data is biased: a ratio of medians, a difference of a source's shares
LENGTH_RATIO = 1.5
SOURCE_DIFFERENCE = 0.3


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
    unit = "tokens" if has_tokens else "characters"
    quartiles = [
        [int(n) for n in np.percentile([_length(each, unit) for each in prompts], (25, 50, 75))]
        for prompts in (failed, others)
    ]
    words = [" / ".join(map(str, each)) for each in quartiles]
    low, high = sorted(max(1, median) for _, median, _ in quartiles)
    said = f"its failed prompts have {words[0]} {unit} (quartiles), others {words[1]}"
    return said, high / low > LENGTH_RATIO


def _length(prompt: RolloutGroup, unit: str) -> int:
    if unit == "tokens":
        return len(prompt.prompt_ids)
    return sum(len(str(message.get("content", ""))) for message in prompt.shared.messages)


def _sources(failed: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> tuple[str, bool]:
    """Compare the shares of the data source that is most typical of the failed prompts."""
    of_failed, of_others = _source_shares(failed), _source_shares(others)
    if len(of_failed.keys() | of_others) < 2:
        return "", False
    source = max(of_failed, key=lambda name: of_failed[name] - of_others.get(name, 0))
    failed_share, other_share = of_failed[source], of_others.get(source, 0)
    named = source or "no source"
    said = f"; {failed_share:.0%} of them are of {named!r}, of the others {other_share:.0%}"
    return said, failed_share - other_share > SOURCE_DIFFERENCE


def _source_shares(prompts: Sequence[RolloutGroup]) -> dict[str, float]:
    counts = Counter(prompt.shared.data_source or "" for prompt in prompts)
    return {source: number / len(prompts) for source, number in counts.items()}
