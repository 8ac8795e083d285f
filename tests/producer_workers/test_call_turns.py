"""Calls of one process under a limit that it shares with others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from buffer.control.call_limit import CallLimit
from buffer.errors import RolloutMQError
from buffer.ids import new_nonce
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.wire.rollout import RolloutState
from producer_workers.call_turns import Turns, reported
from producer_workers.config.task import JudgingSection
from producer_workers.http_client import retry_after_s
from producer_workers.judges.judge import FunctionJudge
from producer_workers.judges.load import HttpJudge
from tests.producer_workers.http_service import http_service
from tests.servers import Server


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    with closing(Store(server.url)) as one:
        yield one


def turns(store: Store, name: str, flow: str = "run task", **limits: int) -> Turns:
    return Turns(store, CallLimit(name, **limits), flow, 10_000)


def test_calls_of_several_processes_are_never_more_than_the_slots(store: Store) -> None:
    running = most = done = 0

    async def call(one: Turns) -> None:
        nonlocal running, most, done
        async with one.turn():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
        done += 1

    async def play() -> None:
        name = new_nonce()
        three = [turns(store, name, f"run t{n}", at_once=4) for n in range(3)]
        calls = [asyncio.create_task(call(one)) for one in three for _ in range(20)]
        calls[7].cancel()
        calls[25].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert reported()["quota_waits"] == 0

    asyncio.run(play())
    assert (done, most) == (58, 4)


def test_call_that_is_cancelled_while_it_runs_gives_its_slot_back(store: Store) -> None:
    async def play() -> None:
        one = turns(store, new_nonce(), at_once=1)
        begun = asyncio.Event()

        async def hang() -> None:
            async with one.turn():
                begun.set()
                await asyncio.sleep(3600)

        call = asyncio.create_task(hang())
        await begun.wait()
        next_one = asyncio.create_task(asyncio.wait_for(one.turn().__aenter__(), 60))
        while not reported()["quota_waits"]:
            await asyncio.sleep(0.01)
        assert reported()["quota"].endswith("(1+at+once)")
        call.cancel()
        await next_one

    asyncio.run(play())


def test_call_of_more_tokens_than_a_minute_has_is_refused(store: Store) -> None:
    async def play() -> None:
        async with turns(store, new_nonce(), tokens_per_minute=100).turn(101):
            raise AssertionError("unreachable")

    with pytest.raises(RolloutMQError, match="101 tokens"):
        asyncio.run(play())


def test_refusal_by_429_makes_the_judge_wait_and_is_no_failed_try(store: Store) -> None:
    answers = [(429, b"slow down"), (429, b"slow down"), (200, b"1.0")]
    asked: list[float] = []

    def answer(_: str, __: object) -> tuple[int, bytes]:
        asked.append(time.monotonic())
        return answers[len(asked) - 1]

    with http_service(answer) as url:

        async def play() -> dict[str, float]:
            judge = HttpJudge(url, JudgingSection(retries=0))
            limited = judge.under(turns(store, new_nonce(), requests_per_minute=6000))
            return await limited.judge(RolloutState(response="4"))

        assert asyncio.run(play()) == {"score": 1.0}
    assert asked[1] - asked[0] >= 0.9
    assert asked[2] - asked[1] >= 0.9


def test_a_service_that_refuses_every_call_is_asked_ever_more_rarely_and_is_reported(
    store: Store,
) -> None:
    began: list[float] = []

    async def play() -> None:
        one = turns(store, new_nonce(), at_once=1)

        async def call() -> None:
            async with one.turn() as turn:
                began.append(time.monotonic())
                turn.refused(0.0, "no money")

        await call()
        await call()
        last = asyncio.create_task(call())
        await asyncio.sleep(0)
        found = reported()
        assert found["quota"].startswith(one.limit.name)
        assert found["quota_refused_ms"] >= 900
        await last
        async with one.turn():
            pass
        assert one.refused_at is None
        assert one._state.refused == 3

    asyncio.run(play())
    first, second = (later - earlier for earlier, later in pairwise(began))
    assert (first >= 0.9, second >= 1.9) == (True, True)


def test_calls_wait_for_a_server_that_is_away_and_then_begin(tmp_path: Path) -> None:
    async def play(server: EmbeddedServer, store: Store) -> None:
        holder, other = (turns(store, "hosted", f"run {n}", at_once=1) for n in "ab")

        async def call() -> None:
            async with other.turn():
                pass

        async with holder.turn():
            waits = asyncio.create_task(call())
            while not (listener := other._bell):
                await asyncio.sleep(0.01)
            server.kill()
            await listener  # it gives up without an error
            server.start()
        async with asyncio.timeout(120):
            await waits

    with EmbeddedServer(tmp_path) as server, closing(Store(server.url, deadline_s=0.2)) as store:
        asyncio.run(play(server, store))


def test_wait_for_a_turn_is_outside_of_the_time_limit_of_a_judge(store: Store) -> None:
    async def score(*, response: str, **_: object) -> float:
        return 1.0

    async def play() -> list[dict[str, float]]:
        judging = JudgingSection(timeout_s=0.5)
        limited = FunctionJudge("score", score, judging).under(
            turns(store, new_nonce(), requests_per_minute=120)
        )
        states = [RolloutState(index=n, response="4") for n in range(4)]
        return await limited.judge_group(states)

    began = time.monotonic()
    assert asyncio.run(play()) == [{"score": 1.0}] * 4
    assert time.monotonic() - began > 1.4


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s({"Retry-After": "2.5"}) == 2.5
    assert retry_after_s({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert retry_after_s({"Retry-After": "soon"}) == 0.0
    assert retry_after_s({"Retry-After": "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"}) == 0.0
    assert retry_after_s({}) == 0.0
