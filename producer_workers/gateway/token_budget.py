"""Share the tokens of a session between its requests, however many run at once.

Invariant: what was sampled, and what running requests may still sample, never exceeds the session's
tokens. A request reserves what it may need before it is sampled and returns what it did not use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TokenBudget:
    """The tokens of one session. `left` are not sampled yet, those of running requests included."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self._reserved = 0
        self._queue = asyncio.Lock()  # requests reserve in the order of their arrival
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, wanted: int | None) -> AsyncIterator[int]:
        """Reserve up to `wanted` tokens (None: all) and yield how many may be sampled.

        It yields 0 if none are left. It waits until running requests leave that many: first come,
        first served. So requests without a limit run one after another.
        """
        async with self._queue:
            while self._reserved and self.left - self._reserved < self._limit(wanted):
                self._returned.clear()
                await self._returned.wait()
            allowed = min(self._limit(wanted), self.left)
            self._reserved += allowed
        try:
            yield allowed
        finally:
            self._reserved -= allowed
            self._returned.set()

    def _limit(self, wanted: int | None) -> int:
        return self.left if wanted is None else wanted

    def spend(self, tokens: int) -> None:
        """Count tokens of a reservation as sampled."""
        self.left -= tokens
