"""A worker finds how many groups keep its engine full, reports it, and obeys live settings."""

from __future__ import annotations

from buffer.control.live_settings import LiveSettings
from tests.pipeline.yard import SLOW_S, Yard


def said(yard: Yard) -> int:
    """Return what `rolloutmq workers` shows."""
    return yard.run.fleet.workers()[0].concurrency


async def test_an_engine_with_room_is_filled_and_one_that_queues_is_given_less(yard: Yard) -> None:
    for _ in range(3):
        yard.enqueue(128, (300, 300))
    async with yard.working(
        yard.worker(token_s=SLOW_S, concurrency="auto", max_num_seqs=40, drain_timeout_s=0.0)
    ) as engine:
        # two requests a group, so 20 groups fill it: the search doubles from 8 to 32 or more,
        # and comes back
        await yard.until(lambda: engine.load().running == 40)
        await yard.until(lambda: 18 <= said(yard) < 32)
        yard.run.set(LiveSettings(concurrency=3))
        await yard.until(lambda: said(yard) == 3)
        yard.run.set(LiveSettings(concurrency="auto"))
        await yard.until(lambda: 18 <= said(yard) < 32)
    yard.check()
