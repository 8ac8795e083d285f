"""Rollouts that failed while others of their group went on, by task and cause.

They are sampled or judged again in the same try of the group, so no failed try counts them: a judge
that raises in one of a hundred calls shows only here.
"""

from __future__ import annotations

import re
from collections import Counter

from buffer.failure_text import cause_of

MOST = 8
"""Pairs of task and cause that a worker counts; what else fails is counted as `OTHER`."""
OTHER = "other"
_ENTRY = re.compile(r"([\w.-]{1,64})/([\w.:/-]{1,64})=(\d{1,15})", re.ASCII)

Retries = Counter[tuple[str, str]]
"""Rollouts by task and cause."""


class RetryCounts:
    """Counted on one thread; others may read the text."""

    def __init__(self) -> None:
        self._counts: Retries = Counter()

    def add(self, task: str, reason: str) -> None:
        cause = re.sub(r"[^\w.:/-]+", "_", cause_of(reason), flags=re.ASCII)[:64]
        pair = (task, cause)
        if pair not in self._counts and len(self._counts) >= MOST:
            pair = (task, OTHER)
        self._counts[pair] += 1

    def text(self) -> str:
        """Return `TASK/CAUSE=NUMBER,…`, without spaces, for a heartbeat."""
        pairs = self._counts.most_common(MOST)
        return ",".join(f"{task}/{cause}={number}" for (task, cause), number in pairs)


def read_retries(text: str) -> Retries:
    """Return what a worker wrote; entries of another form are left out."""
    found: Retries = Counter()
    for entry in text.split(","):
        if of := _ENTRY.fullmatch(entry):
            found[of[1], of[2]] += int(of[3])
    return found
