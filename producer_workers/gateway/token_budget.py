"""Share the tokens of a session between its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TokenBudget:
    """The tokens of one session; `left` are not sampled yet.

    Invariant: sampled tokens and reserved tokens together never exceed the session's tokens. A
    request reserves what it may need and returns what it did not use.
    """

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self._reserved = 0
        self._queue = asyncio.Lock()  # requests reserve in the order of their arrival
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, wanted: int | None) -> AsyncIterator[int]:
        """Reserve up to `wanted` tokens (None: all) and yield how many may be sampled, perhaps 0.

        It waits until running requests leave that many, in the order of arrival. So requests
        without a limit run one after another.
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
        self.left -= tokens
