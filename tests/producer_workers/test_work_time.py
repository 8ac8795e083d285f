"""Limits of time, on an event loop whose clock jumps to what comes next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from producer_workers.work_time import AGENT, LimitedWork, timeout

CLOCK_S = [0.0]


def play(scene: Coroutine[Any, Any, None]) -> None:
    loop: Any = asyncio.SelectorEventLoop()
    CLOCK_S[:] = [0.0]
    select = loop._selector.select

    def jump(wait_s: float | None) -> Any:
        CLOCK_S[0] = round(CLOCK_S[0] + (wait_s or 0.0), 6)
        return select(0)

    loop._selector.select, loop.time = jump, lambda: CLOCK_S[0]
    try:
        loop.run_until_complete(scene)
    finally:
        loop.close()


async def call(wait_s: float, work_s: float, request: str = "") -> None:
    with LimitedWork(is_waiting=True, request=request) as own:
        await asyncio.sleep(wait_s)
        own.begin()
        await asyncio.sleep(work_s)


def test_waits_are_no_working_time_and_everything_else_is() -> None:
    async def scene() -> None:
        async with timeout(10.0):
            await asyncio.sleep(4.0)
            await call(wait_s=100.0, work_s=3.0)
            await asyncio.sleep(1.0)
            await call(wait_s=50.0, work_s=5.0)

    with pytest.raises(TimeoutError):
        play(scene())
    assert CLOCK_S == [160.0]


def test_a_group_works_while_any_of_its_calls_does_so_a_hung_one_is_ended() -> None:
    ended: list[float] = []

    async def scene() -> None:
        with LimitedWork(10.0, lambda: ended.append(CLOCK_S[0]), "math-1"):
            one = asyncio.create_task(call(wait_s=20.0, work_s=1000.0))
            other = asyncio.create_task(call(wait_s=1000.0, work_s=0.0))
            await asyncio.sleep(100.0)
            one.cancel()
            other.cancel()

    play(scene())
    assert ended == [30.0]


def test_an_agent_that_waits_holds_a_slot_and_works_not() -> None:
    """Its requests come from another task, by their name. Another agent of the group hangs."""
    ended: list[str] = []

    async def agent(number: int) -> None:
        with LimitedWork():
            AGENT.set(f"math-1/{number}")
            try:
                async with timeout(10.0):
                    await asyncio.sleep(100.0)
            except TimeoutError:
                ended.append(f"agent {number} at {CLOCK_S[0]}")

    async def scene() -> None:
        gateway = asyncio.create_task(asyncio.sleep(1.0))
        with LimitedWork(60.0, lambda: ended.append(f"group at {CLOCK_S[0]}"), "math-1"):
            agents = [asyncio.create_task(agent(number)) for number in range(2)]
            await gateway
            await asyncio.sleep(1.0)
            ask = asyncio.create_task(call(50.0, 0.0, "math-1/0/solver/7"))
            await asyncio.gather(*agents, ask)
            await asyncio.sleep(100.0)

    play(scene())
    assert ended == ["agent 1 at 10.0", "agent 0 at 60.0", "group at 102.0"]
