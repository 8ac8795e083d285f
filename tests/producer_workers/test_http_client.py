from __future__ import annotations

import asyncio
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from buffer.errors import JudgeError, NoAnswer, RolloutMQError
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from producer_workers.engines.http.server import CompletionServer
from producer_workers.http_client import LONGEST_ANSWER, Service, ask
from producer_workers.judges.load import HttpJudge
from producer_workers.user_code.sandbox import Limits, run_at
from rolloutmq.extensions.environments import nemo_gym
from rolloutmq.extensions.gateway.agents import AgentTask

ENDLESS = 256 << 20  # bytes; nobody reads on for as many
KEY = "rmq-a-secret-key"


@dataclass
class Stranger:
    """Answers every request in one way. `asked`: what it was sent; `sent`: bytes of its answers."""

    status: int = 200
    location: str = ""
    asked: list[bytes] = field(default_factory=list)
    sent: int = 0

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[str]:
        server = web.Server(self._answer)
        runner = web.ServerRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(str(request.headers).encode() + await request.read())
        answer = web.StreamResponse(status=self.status)
        if self.location:
            answer.headers["Location"] = self.location
        await answer.prepare(request)
        piece = b" " * (1 << 20)
        while not self.location and self.sent < ENDLESS:
            await answer.write(piece)
            self.sent += len(piece)
        return answer


async def judge(url: str) -> None:
    judging = JudgingSection(retries=0)
    await HttpJudge(url, judging).judge_group([RolloutState(response=KEY)])


async def sandbox(url: str) -> None:
    result = await run_at(url, KEY, "", Limits())
    if result.problem:
        raise RolloutMQError(result.problem)


async def gym(url: str) -> None:
    task = AgentTask("http://127.0.0.1:1/v1", KEY, [], extra={"row": {}})
    await nemo_gym.play(task, url=url)


async def engine(url: str, call: Callable[[CompletionServer], Awaitable[object]]) -> None:
    server = CompletionServer(url, "m", KEY)
    server._session = aiohttp.ClientSession(headers=server._headers)
    try:
        await call(server)
    finally:
        await server.close()


async def models(url: str) -> None:
    await engine(url, CompletionServer.models)


async def scores(url: str) -> None:
    await engine(url, lambda server: server.scores([1, 2], 1, 1, 60.0))


async def stream(url: str) -> None:
    async def read(server: CompletionServer) -> None:
        async for _ in server.stream([1], {}):
            pass

    await engine(url, read)


CALLERS = (judge, sandbox, gym, models, scores, stream)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("caller", CALLERS)
def test_no_request_and_no_key_goes_where_a_server_points(
    caller: Callable[[str], Awaitable[None]], status: int
) -> None:
    elsewhere = Stranger()

    async def scene() -> None:
        async with elsewhere.at_work() as there:
            stranger = Stranger(status=status, location=f"{there}/run")
            async with stranger.at_work() as url:
                with pytest.raises(RolloutMQError, match=f"points to {there}/run"):
                    await caller(url)
            assert KEY.encode() in b"".join(stranger.asked)

    asyncio.run(scene())
    assert elsewhere.asked == []


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("caller", CALLERS)
def test_an_answer_without_an_end_is_not_read_to_its_end(
    caller: Callable[[str], Awaitable[None]], status: int
) -> None:
    stranger = Stranger(status=status)

    async def scene() -> None:
        async with stranger.at_work() as url:
            with pytest.raises(RolloutMQError):
                await caller(url)

    asyncio.run(scene())
    assert 0 < stranger.sent < ENDLESS


def test_a_small_answer_that_unpacks_to_a_large_one_is_not_unpacked() -> None:
    packed = zlib.compress(b" " * ENDLESS)

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "deflate"})

    async def scene() -> int:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as client:
            tracemalloc.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            assert not (await ask(client, "GET", url, limit_s=None)).is_whole
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        await runner.cleanup()
        return peak

    assert asyncio.run(scene()) < ENDLESS / 8


def test_an_answer_has_a_limit_of_time_and_one_of_bytes() -> None:
    async def late(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        if request.path == "/slow":
            while True:
                await answer.write(b" ")
                await asyncio.sleep(0.01)
        await answer.write(b"x" * int(request.path[1:]))
        return answer

    async def scene() -> None:
        runner = web.ServerRunner(web.Server(late), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as client:
            with pytest.raises(NoAnswer, match=r"within its limit of 0\.5 s"):
                await ask(client, "GET", f"{url}/slow", limit_s=0.5)
            whole = await ask(client, "GET", f"{url}/{LONGEST_ANSWER}", limit_s=None)
            assert (len(whole.body), whole.is_whole, whole.problem) == (LONGEST_ANSWER, True, "")
            cut = await ask(client, "GET", f"{url}/{LONGEST_ANSWER + 1}", limit_s=None)
            assert (len(cut.body), cut.is_whole) == (LONGEST_ANSWER, False)
            assert cut.problem == f"sent more than {LONGEST_ANSWER} bytes"
            few = await ask(client, "GET", f"{url}/9", limit_s=None, most=8)
            assert not few.is_whole
        await runner.cleanup()
        async with aiohttp.ClientSession() as client:
            with pytest.raises(NoAnswer, match="Connect"):
                await ask(client, "GET", url, limit_s=5.0)

    asyncio.run(scene())


async def test_hundreds_of_calls_that_fail_at_once_are_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service("judge", "http://127.0.0.1:9", 60.0, 1, "start it")
    asked = [service.ask({}) for _ in range(200)]
    failures = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(each) for each in failures} == {JudgeError}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "try 1 of 2" in warning
