from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web

from buffer.wire.rollout import PolicyVersion
from producer_workers.config.engine import HttpConfig
from producer_workers.engines import build_engine
from producer_workers.engines.base import (
    Engine,
    EngineDeadError,
    EngineError,
    Generation,
    WeightsError,
)
from producer_workers.engines.http.engine import HttpEngine
from tests.producer_workers.engines.adapter_contract import REDIS, AdapterContract
from tests.producer_workers.engines.conformance import (
    LONG,
    NEXT,
    TOLERANCE,
    ModelContract,
    generate,
    interrupt,
    sampling,
    worst_difference,
)
from tests.producer_workers.engines.conftest import FIRST, Folders, Run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def engine(http_engine: Engine) -> Engine:
    return http_engine


class TestHttp(ModelContract):
    """The contract."""


Change = Callable[[dict[str, Any]], None]


def plain_openai(body: dict[str, Any]) -> None:
    """As a server that knows only what OpenAI has documented."""
    body.pop("return_token_ids", None)
    body.pop("return_tokens_as_token_ids", None)


def nothing(body: dict[str, Any]) -> None:
    pass


def raw_logprobs(body: dict[str, Any]) -> None:
    if not body.get("stream"):
        body["temperature"] = 1.0


class Proxy:
    """Stands before the real server and changes requests by `change`.

    A static one has none of the endpoints for weights. `label`: the version that it says the
    weights have.
    """

    def __init__(self, upstream: str, change: Change, *, static: bool) -> None:
        self._upstream = upstream
        self._change = change
        self._paths = "health|v1/models|v1/completions" if static else ".*"
        self.label = ""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", f"/{{path:{self._paths}}}", self._pass_on)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        finally:
            await self.close()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self.label and request.path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        data = await request.read()
        if data:
            body = orjson.loads(data)
            self._change(body)
            data = orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self._upstream + request.path_qs, data=data, headers=headers
            ) as answer,
        ):
            response = web.StreamResponse(status=answer.status)
            await response.prepare(request)
            with suppress(ConnectionError):  # the engine hung up, so we do
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            return response


@asynccontextmanager
async def behind_proxy(
    url: str,
    folder: Path,
    change: Change = nothing,
    *,
    weights: str = "static",
    static: bool = True,
) -> AsyncIterator[tuple[HttpEngine, Proxy]]:
    proxy = Proxy(url, change, static=static)
    async with proxy.open() as address:
        engine = HttpEngine(
            HttpConfig.model_validate({"url": address, "weights": weights}), folder, FIRST
        )
        await engine.start()
        try:
            yield engine, proxy
        finally:
            await engine.shutdown()


@pytest.mark.parametrize(
    ("change", "weights", "what"),
    [
        (plain_openai, "static", "return_token_ids"),
        (raw_logprobs, "static", "processed_logprobs"),
        (nothing, "update", "VLLM_SERVER_DEV_MODE"),
        (nothing, "adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ],
)
def test_a_server_is_refused_that_would_make_ids_logprobs_or_versions_untrue(
    server_url: str, folders: Folders, run: Run[Any], change: Change, weights: str, what: str
) -> None:
    async def scenario() -> None:
        async with behind_proxy(server_url, folders.first, change, weights=weights):
            raise AssertionError("it was not refused")

    with pytest.raises(EngineError, match=what):
        run(scenario())


def test_a_static_server_keeps_its_version_and_loses_no_token(
    server_url: str, folders: Folders, run: Run[Any]
) -> None:
    """It cannot be paused, so the engine hangs up, and goes on behind what it has."""
    greedy = sampling(LONG, temperature=0.0)

    async def scenario() -> tuple[Generation, ...]:
        async with behind_proxy(server_url, folders.first) as (engine, _):
            with pytest.raises(WeightsError, match="static"):
                await engine.load_weights(folders.second, NEXT)
            whole = await generate(engine, greedy)

            running = asyncio.create_task(generate(engine, greedy))
            await asyncio.sleep(0.1)
            await engine.pause("keep")
            await engine.resume()
            kept = await running
            part = await interrupt(engine, greedy, lambda: engine.pause("abort"))
            await engine.resume()
            return whole, kept, part

    whole, kept, part = run(scenario())
    assert np.array_equal(kept.token_ids, whole.token_ids)
    assert part.finish_reason == "abort"
    assert np.array_equal(part.token_ids, whole.token_ids[: len(part.token_ids)])
    for made in (whole, kept, part):
        assert [(span.lineage, span.version) for span in made.spans] == [FIRST]
        assert made.spans[0].length == len(made.token_ids) == len(made.logprobs)


def test_requests_fail_and_the_engine_is_dead_when_its_server_is_gone(
    server_url: str, folders: Folders, run: Run[Any]
) -> None:
    async def scenario() -> None:
        async with behind_proxy(server_url, folders.first) as (engine, proxy):
            running = asyncio.create_task(generate(engine, sampling(LONG)))
            await asyncio.sleep(0.1)
            await proxy.close()
            with pytest.raises(EngineDeadError, match="does not answer"):
                await asyncio.gather(running, generate(engine, sampling(LONG)))
            with pytest.raises(EngineDeadError):
                engine.check_health()

    run(scenario())


def test_a_cancelled_request_is_aborted_on_the_server(
    http_engine: Engine, server_url: str, run: Run[Any]
) -> None:
    async def on_server() -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{server_url}/metrics") as answer,
        ):
            lines = (await answer.text()).splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        )

    async def until(wanted: Callable[[float], bool]) -> None:
        end = time.monotonic() + 400
        while not wanted(await on_server()):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        tasks = [asyncio.create_task(generate(http_engine, sampling(1900))) for _ in range(24)]
        await until(lambda count: count > 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda count: count == 0)

    run(scenario())


def test_weights_that_somebody_else_changed_end_the_engine(
    server_url: str, folders: Folders, run: Run[Any]
) -> None:
    async def scenario() -> None:
        async with behind_proxy(server_url, folders.first, weights="update", static=False) as (
            engine,
            proxy,
        ):
            assert len((await generate(engine, sampling(4))).token_ids) == 4
            proxy.label = "theirs:9"
            end = time.monotonic() + 400
            while engine._dead is None and time.monotonic() < end:
                await asyncio.sleep(0.05)
            with pytest.raises(EngineDeadError, match="another client"):
                engine.check_health()

    run(scenario())


def test_a_server_that_a_dead_worker_left_paused_is_taken_over(
    server_url: str, folders: Folders, run: Run[Any]
) -> None:
    async def scenario() -> Generation:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server_url}/pause?mode=keep") as answer,
        ):
            assert answer.status == 200
        async with behind_proxy(server_url, folders.first, weights="update", static=False) as (
            engine,
            _,
        ):
            return await generate(engine, sampling(4))

    assert len(run(scenario()).token_ids) == 4


class TestAdapters(AdapterContract):
    """The contract over a server that accepts adapters.

    It is the last of this file: other engines find their weights replaced.
    """

    @pytest.fixture
    def engine(self, run: Run[None], folders: Folders, server_url: str) -> Iterator[Engine]:
        engine = build_engine(HttpConfig(url=server_url, weights="adapters"), folders.first, FIRST)
        run(engine.start())
        yield engine
        run(engine.shutdown())

    @pytest.fixture
    def policy(self) -> dict[str, Any]:
        return REDIS

    def test_one_adapter_is_served_and_those_of_a_dead_worker_are_gone(
        self, engine: Engine, run: Run[Any], folders: Folders, adapters: list[Path], server_url: str
    ) -> None:
        async def served() -> list[str]:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{server_url}/v1/models") as answer,
            ):
                return [row["id"] for row in (await answer.json())["data"]]

        async def scenario() -> tuple[list[str], list[str], Generation]:
            for number, adapter in enumerate(adapters):
                await engine.load_weights(adapter, PolicyVersion("main", number))
            before = await served()
            heir = build_engine(
                HttpConfig(url=server_url, weights="adapters"), folders.first, FIRST
            )
            await heir.start()
            try:
                return before, await served(), await generate(heir, sampling(30, seed=3))
            finally:
                await heir.shutdown()

        before, after, made = run(scenario())
        assert len(before) == 2
        assert after == before[:1] == [str(folders.first)]
        assert worst_difference(folders.first, made, 1.0) < TOLERANCE
