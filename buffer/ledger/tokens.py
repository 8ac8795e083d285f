"""The account of tokens: each that an engine sampled ends in one row, or is in a stage (I1).

    engine ─▶ worker: running ─▶ groups: waiting, running, pool, taken ─▶ a row of TOKEN_ROWS
               └ its lease or process is lost ─▶ lost

A group takes its tokens along in the scripts that move it (`lua/shared/tokens.lua`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from buffer.redis.key_table import TOKEN_ROWS
from buffer.redis.keys import Keys
from buffer.redis.scripts import Arg
from buffer.redis.store import Store

MOST_GROUPS = 5000
"""Groups that wait, run or are taken, which are read one by one, in 10 ms of the server."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens of one task, or of all: `table` has them by row, and by stage where they are in none.

    `reported`: those of `running` that are in no group, as workers' last heartbeats said. Beside
    the table: `prompt`, read by the engines, `again` after resumes.
    """

    table: Counter[str] = field(default_factory=Counter)
    reported: int = 0
    prompt: int = 0
    again: int = 0

    @property
    def ended(self) -> int:
        return sum(self.table[row] for row in TOKEN_ROWS)

    @property
    def total(self) -> int:
        return self.table.total()

    def __add__(self, other: TokenAccount) -> TokenAccount:
        table = self.table.copy()
        table.update(other.table)
        sums = (self.reported + other.reported, self.prompt + other.prompt)
        return TokenAccount(table, *sums, self.again + other.again)


def read_tokens(store: Store, keys: Keys, tasks: Sequence[str]) -> dict[str, TokenAccount]:
    """Return the accounts of some tasks, as of one instant for all."""
    fields = " ".join(f"tokens_{name}" for name in ("sampled", "prompt", "again", *TOKEN_ROWS))
    args: dict[str, Arg] = {"fields": fields, "limit": MOST_GROUPS}
    reply = store.call("tokens", keys.slots(), args, [keys.slots(task=t) for t in tasks], tasks)
    numbers, found = map(int, reply[1:]), {}
    for task in tasks:
        sampled, prompt, again = islice(numbers, 3)
        rows = islice(numbers, len(TOKEN_ROWS))
        table = Counter(dict(zip(TOKEN_ROWS, rows, strict=True)))
        reported, waiting, running, taken = islice(numbers, 4)
        rest = sampled - table.total()
        stages = {"in_groups": rest, "running": reported}
        if running >= 0:  # else they are too many
            stages = {"waiting": waiting, "running": running + reported, "taken": taken}
            stages["pool"] = rest - waiting - running - taken
        table.update(stages)
        found[task] = TokenAccount(table, reported, prompt, again)
    return found
