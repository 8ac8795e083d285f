"""The account of tokens: each that an engine sampled ends in one row, or is in a stage (I1).

    engine ─▶ worker: running ─▶ groups: waiting, running, pool, taken ─▶ a row of TOKEN_ROWS
               └ its lease or process is lost ─▶ lost

A group takes its tokens along in the scripts that move it (`lua/shared/tokens.lua`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.redis.key_table import TOKEN_ROWS
from buffer.redis.keys import Keys
from buffer.redis.scripts import Arg
from buffer.redis.store import Store

USED = ("trained", "evaluated")
"""Rows of tokens that served what they were sampled for."""

MOST_GROUPS = 5000
"""Groups that wait, run or are taken, which are read one by one, in 10 ms of the server."""

MOST_WORKERS = 50_000  # ten times the largest fleet that was measured (benchmarks/README.md)

_COUNTED = ("sampled", "prompt", "again", *TOKEN_ROWS)


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens of one task, or of all.

    `sampled`: in groups and rows. `reported`: beside these, with workers, as their last heartbeats
    said. `stages`: all that is in no row. `prompt`: read by the engines, `again` after resumes.
    """

    sampled: int
    reported: int
    rows: Mapping[str, int]
    stages: Mapping[str, int]
    prompt: int = 0
    again: int = 0

    @property
    def ended(self) -> int:
        return sum(self.rows.values())

    @property
    def total(self) -> int:
        return self.sampled + self.reported

    @property
    def table(self) -> dict[str, int]:
        """Return all rows, stages too; their sum is `total`."""
        return {**self.rows, **self.stages}

    @classmethod
    def of_all(cls, accounts: Sequence[TokenAccount]) -> TokenAccount:
        rows, stages = Counter[str](), Counter[str]()
        for account in accounts:
            rows.update(account.rows)
            stages.update(account.stages)
        counts = ("sampled", "reported", "prompt", "again")
        sums = {n: sum(getattr(a, n) for a in accounts) for n in counts}
        return cls(rows=rows, stages=stages, **sums)


def read_tokens(store: Store, keys: Keys, tasks: Sequence[str]) -> dict[str, TokenAccount]:
    """Return the accounts of some tasks, as of one instant for all."""
    fields = " ".join(f"tokens_{name}" for name in _COUNTED)
    args: dict[str, Arg] = {"fields": fields, "limit": MOST_GROUPS, "worker_limit": MOST_WORKERS}
    reply = store.call("tokens", keys.slots(), args, [keys.slots(task=t) for t in tasks], tasks)
    numbers, found = iter(reply[1:]), {}
    for task in tasks:
        sampled, prompt, again = (int(next(numbers)) for _ in range(3))
        rows = {name: int(next(numbers)) for name in TOKEN_ROWS}
        reported, waiting, running, taken = (int(next(numbers)) for _ in range(4))
        rest = sampled - sum(rows.values())
        stages = {"in_groups": rest, "running": reported}
        if running >= 0:  # else they are too many
            stages = {"waiting": waiting, "running": running + reported, "taken": taken}
            stages["pool"] = rest - waiting - running - taken
        found[task] = TokenAccount(sampled, reported, rows, stages, prompt, again)
    return found
