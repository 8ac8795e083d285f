"""Builds that must be caught: all scripts, with one line of one of them gone or changed, and a
trainer that receives into memory which is still used.

A few, which must show within a minute of faults. Every line that keeps an invariant has a story of
its own in tests/buffer/invariants; what is guarded twice shows only there: the cursor (a fence,
compare-and-set), the step of a trainer that was replaced (it may not commit either), a claim that
is repeated (its lost groups run out).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np

from buffer.redis.connection import bulk_io
from buffer.redis.scripts import Script, assemble, sources

MUTATIONS = {
    # I1
    "reaped-and-gone": ("include/take_back",
                        "      local place = retry_or_dead_letter(one.keys, one.gid, max_tries, letter)\n",
                        "      local place = 'waiting'\n"),
    "claims-leave-the-job": ("claim", "    redis.call('XDEL', jobs, unpack(given[n]))\n", ""),
    "archived-is-not-counted": ("commit", "    redis.call('HINCRBY', task.progress, 'archived', task.count)\n", ""),
    # I2
    "zombies-submit": ("submit", "if held[4] ~= token or stage ~= 'running' then return {'FENCED'} end\n", ""),
    # I3
    "cursor-stays": ("enqueue", "move_cursor(cursors, progress, task, start + drawn)\n", ""),
    # I4, I5
    "batch-stays-in-pool": ("include/next_in_order", "  redis.call('ZREM', pool, unpack(members))\n", ""),
    "batch-is-no-record": (
        "take_batch",
        "if redis.call('EXISTS', batch) == 1 then return {'OK', unpack(redis.call('LRANGE', batch, 0, -1))} end\n",
        "",
    ),
    # I6
    "frees-all-that-is-committed": ("commit", "keep = math.min(keep, committed)\n", "keep = committed\n"),
    # I8
    "nothing-is-too-old": ("take_batch",
                           "cuts[n] = threshold and int(step - threshold) or '-inf'\n",
                           "cuts[n] = '-inf'\n"),
}  # fmt: skip
"""Name: (file, what is there, what takes its place)."""

MEMORY = "memory-is-lent-twice"
"""Not a script: `lend_twice`."""

NAMES = (*MUTATIONS, MEMORY)

LENT_BYTES = 1 << 20
LENT_PIECES = 2
"""The trainer reads as many batches until it looks at one again."""


def scripts_of(name: str) -> Mapping[str, Script]:
    """All scripts of the mutated build `name`."""
    file, old, new = MUTATIONS[name]
    texts = sources()
    assert texts[file].count(old) == 1, f"{file}.lua has no longer exactly one {old!r}"
    texts[file] = texts[file].replace(old, new)
    return assemble(texts)


def lend_twice() -> None:
    """Let a trainer receive its batches into a few pieces of memory by turns, still used or not."""
    inbox: Any = bulk_io._Inbox
    begin = inbox.__init__
    memory = cycle([np.empty(LENT_BYTES, np.uint8).data for _ in range(LENT_PIECES)])

    def begin_in_lent_memory(self: Any, sock: Any, size: int) -> None:
        begin(self, sock, size)
        if size <= LENT_BYTES:
            self._memory = next(memory)

    inbox.__init__ = begin_in_lent_memory
