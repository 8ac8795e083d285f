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

from buffer.redis import bulk_io
from buffer.redis.scripts import Script
from proofs.model_check.mutation import read_mutations

MUTATIONS = {one.chaos: one for one in read_mutations() if one.chaos}

MEMORY = "memory-is-lent-twice"
"""Not a script: `lend_twice`."""

NAMES = (*MUTATIONS, MEMORY)

LENT_BYTES = 1 << 20
LENT_PIECES = 2
"""The trainer reads as many batches until it looks at one again."""


def scripts_of(name: str) -> Mapping[str, Script]:
    """All scripts of the mutated build `name`."""
    return MUTATIONS[name].scripts()


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
