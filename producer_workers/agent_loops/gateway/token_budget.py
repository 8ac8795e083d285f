"""The tokens that all requests of a session share, however many of them run at once.

Invariant: what was sampled, and what running requests may still sample, is never more than the
session has. A request takes what it may need before it is sampled and gives back what it did not
use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TokenBudget:
    """`left`: tokens that are not sampled yet, those of running requests included."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self._reserved = 0
        self._line = asyncio.Lock()
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, wanted: int | None) -> AsyncIterator[int]:
        """How many may be sampled: `wanted`, or what is left (None: all of it); 0 if that is
        nothing.

        Where others run, waits until they leave as many: first come, first served. So requests that
        name no `wanted` run one after another.
        """
        async with self._line:
            while self._reserved and self.left - self._reserved < (
                self.left if wanted is None else wanted
            ):
                self._returned.clear()
                await self._returned.wait()
            allowed = min(self.left if wanted is None else wanted, self.left)
            self._reserved += allowed
        try:
            yield allowed
        finally:
            self._reserved -= allowed
            self._returned.set()

    def spend(self, tokens: int) -> None:
        """So many of a reservation are sampled."""
        self.left -= tokens
