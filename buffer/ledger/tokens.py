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
from buffer.redis.store import Store

USED = ("trained", "evaluated")
"""Rows of tokens that served what they were sampled for."""

_COUNTED = ("sampled", "prompt", "again", *TOKEN_ROWS)
_STAGES = ("waiting", "running", "taken")
_FIELDS = " ".join(f"tokens_{name}" for name in _COUNTED)


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens of one task, or of all.

    `sampled`: in groups and rows. `stages`: of them, in groups that wait, run or are taken.
    `reported`: beside these, with workers, as their last heartbeats said. `prompt`: read by the
    engines, `again` after resumes.
    """

    sampled: int
    rows: Mapping[str, int]
    stages: Mapping[str, int]
    reported: int = 0
    prompt: int = 0
    again: int = 0

    @property
    def ended(self) -> int:
        return sum(self.rows.values())

    @property
    def in_groups(self) -> int:
        return self.sampled - self.ended

    @property
    def total(self) -> int:
        return self.sampled + self.reported

    @property
    def table(self) -> dict[str, int]:
        """Return all rows, stages too; their sum is `total`."""
        return {
            **self.rows,
            "waiting": self.stages["waiting"],
            "running": self.stages["running"] + self.reported,
            "pool": self.in_groups - sum(self.stages.values()),
            "taken": self.stages["taken"],
        }

    @classmethod
    def of_all(cls, accounts: Sequence[TokenAccount]) -> TokenAccount:
        rows, stages = Counter(dict.fromkeys(TOKEN_ROWS, 0)), Counter(dict.fromkeys(_STAGES, 0))
        for account in accounts:
            rows.update(account.rows)
            stages.update(account.stages)
        counts = ("sampled", "reported", "prompt", "again")
        sums = {name: sum(getattr(each, name) for each in accounts) for name in counts}
        return cls(rows=rows, stages=stages, **sums)


def read_tokens(store: Store, keys: Keys, tasks: Sequence[str]) -> dict[str, TokenAccount]:
    """Return the accounts of some tasks, as of one instant for all."""
    units = [keys.slots(task=task) for task in tasks]
    reply = store.call("tokens", keys.slots(), {"fields": _FIELDS}, units, tasks)
    names = (*_COUNTED, *_STAGES, "reported")
    numbers = iter(map(int, reply[1:]))
    found = {}
    for task in tasks:
        of = {name: next(numbers) for name in names}
        rows, stages = ({name: of.pop(name) for name in part} for part in (TOKEN_ROWS, _STAGES))
        found[task] = TokenAccount(rows=rows, stages=stages, **of)
    return found
