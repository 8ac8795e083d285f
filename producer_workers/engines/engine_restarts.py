"""Starts another engine when a worker's engine dies, later each time, and a limited number.

Between two engines the worker is deregistered, so that no pause waits for its receipt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from buffer.errors import ModelError
from buffer.redis.retry import Backoff
from producer_workers.engines.base import Engine, EngineDeadError

log = logging.getLogger("rolloutmq.worker")

BACKOFF = Backoff(1.0, 60.0, jitter=0.0)  # pauses before an engine is started again


async def serve(
    start: Callable[[], Awaitable[Engine]],
    work: Callable[[Engine, int], Awaitable[None]],
    most: int,
) -> None:
    """Call `work(engine, restarts)`, again with a new engine after each EngineDeadError.

    Raises what the first `start` raises, and EngineDeadError after `most` restarts. A restart that
    fails counts as one: a server that an engine talks to may need longer than the first wait.
    """
    engine = await start()
    restarts = 0
    while True:
        began = time.monotonic()
        try:
            return await work(engine, restarts)
        except EngineDeadError as error:
            died = error
        finally:
            await engine.shutdown()
        # an engine that lived this long died of another cause: count anew
        restarts = 0 if time.monotonic() - began > 600.0 else restarts
        engine, restarts = await _restart(start, died, restarts, most)


async def _restart(
    start: Callable[[], Awaitable[Engine]], reason: ModelError, done: int, most: int
) -> tuple[Engine, int]:
    """Return a new engine, and how many restarts there were now."""
    for number in range(done + 1, most + 1):
        wait_s = BACKOFF.pause_s(number - 1)
        log.error("the engine died, restart %d of %d in %g s: %s", number, most, wait_s, reason)
        await asyncio.sleep(wait_s)
        try:
            return await start(), number
        except ModelError as error:
            reason = error
    raise EngineDeadError(
        f"giving up after {most} restarts of the engine: {reason}",
        hint="its log above shows why; [engine] restarts sets how many are tried",
    ) from reason
