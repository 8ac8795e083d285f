"""A wait for a quota is no working time of a group, and uses up no try."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from buffer.control.call_limit import CallLimit
from buffer.ids import new_nonce
from buffer.wire.rollout import RolloutState
from producer_workers.call_turns import Turns
from producer_workers.judges.judge import FunctionJudge
from tests.pipeline.yard import Yard

LIMIT_S = 2.0


def score(*, response: str, ground_truth: object, state: RolloutState) -> float:
    return 1.0


async def test_a_group_whose_judge_waits_longer_than_its_time_limit_is_completed(
    yard: Yard,
) -> None:
    limit = CallLimit(new_nonce(), at_once=1)
    holder, turns = (Turns(yard.store, limit, f"run {n}", 60_000) for n in "ab")
    judge = FunctionJudge("test", score).under(turns)
    yard.enqueue(1)
    async with AsyncExitStack() as held:
        await held.enter_async_context(holder.turn())
        async with yard.working(yard.worker(judge=judge, group_time_limit_s=LIMIT_S)):
            await yard.until(lambda: turns.waiting == 2)
            await asyncio.sleep(1.5 * LIMIT_S)
            await held.aclose()
            await yard.until_stages(completed=1)
    assert "failed" not in yard.counters()
    yard.check()
