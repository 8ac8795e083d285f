"""The account of tokens: each that an engine sampled ends in one row, or is in a stage (I1).

    engine ─▶ worker: running ─▶ groups: waiting, pools, taken ─▶ a row of TOKEN_ROWS
               └ its lease or process is lost ─▶ lost

A group takes its tokens along in the scripts that move it (`lua/shared/tokens.lua`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from buffer.redis.bulk_io import Command
from buffer.redis.key_fields import read_counts
from buffer.redis.key_table import TOKEN_ROWS
from buffer.redis.keys import Keys
from buffer.redis.store import Store

USED = ("trained", "evaluated")
"""Rows of tokens that served what they were sampled for."""

_FIELDS = [f"tokens_{name}" for name in ("sampled", "prompt", "again", *TOKEN_ROWS)]


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens of one task, or of all.

    `sampled`: in groups and rows. `running`: beside these, with workers, as their last heartbeats
    said. `prompt`: read by the engines, `again` after resumes.
    """

    sampled: int
    rows: Mapping[str, int]
    running: int = 0
    prompt: int = 0
    again: int = 0

    @property
    def ended(self) -> int:
        return sum(self.rows.values())

    @property
    def in_groups(self) -> int:
        """Return the tokens of groups that wait, are in a pool, or are taken."""
        return self.sampled - self.ended

    @property
    def total(self) -> int:
        return self.sampled + self.running

    @property
    def table(self) -> dict[str, int]:
        """Return all rows, stages too; their sum is `total`."""
        return {**self.rows, "in_groups": self.in_groups, "running": self.running}

    @classmethod
    def of_all(cls, accounts: Sequence[TokenAccount]) -> TokenAccount:
        rows = Counter(dict.fromkeys(TOKEN_ROWS, 0))
        for account in accounts:
            rows.update(account.rows)
        counts = ("sampled", "running", "prompt", "again")
        return cls(rows=rows, **{n: sum(getattr(a, n) for a in accounts) for n in counts})


def read_tokens(store: Store, keys: Keys, tasks: Sequence[str]) -> dict[str, TokenAccount]:
    """Return the accounts of some tasks, in two round trips."""
    workers = [w.decode() for w in store.ask("workers", "ZRANGE", keys.workers, 0, -1)]
    reads: list[Command] = [("HGETALL", keys.worker_tokens_of + worker) for worker in workers]
    reads += [("HMGET", keys.progress(task), *_FIELDS) for task in tasks]
    replies = store.send("tokens", reads)
    running = Counter[str]()
    for of_worker in replies[: len(workers)]:
        for task, totals in of_worker.items():
            heard, _, accounted = totals.partition(b" ")
            if heard.isdigit() and accounted.isdigit():
                running[task.decode(errors="replace")] += int(heard) - int(accounted)
    found = {}
    for task, values in zip(tasks, replies[len(workers) :], strict=True):
        sampled, prompt, again, *rows = read_counts(keys.progress(task), _FIELDS, values)
        by_row = dict(zip(TOKEN_ROWS, rows, strict=True))
        account = TokenAccount(sampled, by_row, prompt=prompt, again=again)
        found[task] = replace(account, running=running[task])
    return found
