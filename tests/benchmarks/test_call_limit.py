"""The benchmark's workers, fewer of them: real processes and a real server, and one is killed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from benchmarks.call_limit import Counting, end, start
from buffer.control.call_limit import CallLimit
from buffer.ids import new_nonce
from tests.servers import Server


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_slots_of_killed_processes_return_and_a_refusal_stops_everybody(server: Server) -> None:
    limit = CallLimit(new_nonce(), at_once=3)

    async def play() -> None:
        service = Counting()
        runner, url = await service.serve()
        fleet = [start(server.url, url, run, limit, 10_000) for run in "ab"]

        async def calls_of(run: str, more: int) -> None:
            before = Counter(each.run for each in service.arrivals)[run]
            while Counter(each.run for each in service.arrivals)[run] < before + more:
                assert all(process.poll() is None for process in fleet)
                await asyncio.sleep(0.02)

        try:
            async with asyncio.timeout(300):
                await asyncio.gather(calls_of("a", 10), calls_of("b", 10))
                end(fleet.pop(0))
                await calls_of("b", 60)
                clock = asyncio.get_running_loop().time
                service.refuses_until_s = clock() + 3.0
                while not service.arrivals[-1].is_refused:
                    await asyncio.sleep(0.01)
                await calls_of("b", 20)
        finally:
            for process in fleet:
                end(process)
            await runner.cleanup()
        # those in progress, and those whose permits were given before the first refusal
        assert sum(each.is_refused for each in service.arrivals) <= 2 * limit.at_once
        assert 1 < service.most_open <= limit.at_once

    asyncio.run(play())
