from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from buffer.control.call_limit import CallLimit
from buffer.redis.retry import Backoff
from buffer.redis.store import Store
from buffer.wire.sampling import SampleParams
from producer_workers.call_turns import Turns
from producer_workers.config.engine import HttpConfig
from producer_workers.engines.base import EngineError, Generation, GenerationError
from producer_workers.engines.http import engine as http_engine
from producer_workers.engines.http.engine import HttpEngine
from producer_workers.engines.http.event_stream import event_data
from tests.producer_workers.engines.conftest import FIRST, Run

LAST = b"data: [DONE]\n\n"
REFUSAL = b"429"


def told(tokens: Sequence[int], finish: str | None = None) -> bytes:
    """Return an event's data, as vLLM writes it."""
    values = {"token_logprobs": [-0.5] * len(tokens)}
    choice = {"token_ids": tokens, "logprobs": values, "finish_reason": finish}
    return orjson.dumps({"choices": [choice]})


class Server:
    """Answers `/v1/completions` as vLLM does, and each stream after the first with `streams`.

    The last of `streams` is repeated. `asked`: the prompts of the streams.
    """

    def __init__(self, *streams: bytes, models: bytes = b'{"data": [{"id": "m"}]}') -> None:
        self.streams = [b"data: " + told([1], "length") + b"\n\n" + LAST, *streams]
        self.models = models
        self.asked: list[list[int]] = []

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._is_well)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _is_well(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _list(self, _: web.Request) -> web.Response:
        return web.Response(body=self.models)

    async def _complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("stream"):
            self.asked.append(asked["prompt"])
            body = self.streams[min(len(self.asked), len(self.streams)) - 1]
            if body == REFUSAL:
                return web.Response(status=429, headers={"Retry-After": "0.5"})
            return web.Response(body=body)
        heat = asked.get("temperature", 1.0)
        two = {"3": -0.5 / heat, "4": -1.5 / heat}
        choice = {"text": "", "logprobs": {"top_logprobs": [two]}}
        return web.json_response({"choices": [choice]})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "PAUSES", Backoff(0.001, 0.001))


async def sampled(server: Server, max_tokens: int = 8) -> Generation:
    async with server as url:
        engine = HttpEngine(HttpConfig(url=url, weights="static"), Path(), FIRST)
        await engine.start()
        try:
            params = SampleParams(max_tokens=max_tokens)
            async with asyncio.timeout(60):
                return await engine.generate("g/0", np.array([9, 9], "<i4"), params)
        finally:
            await engine.shutdown()


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        LAST,
        b": a comment\n\n",
        b"data: " + told([]) + b"\n\n" + LAST,
        b"data: " + told([], "abort") + b"\n\n" + LAST,
        b"data: " + told([5], "stop"),  # the stream ends in the middle of the event
        b"event: ping\nid: 1\nretry: 10\n\n" + LAST,
    ],
)
def test_streams_that_bring_nothing_fail_the_request_after_a_few_tries(
    run: Run[Any], stream: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(stream)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(GenerationError, match=r"http://127\.0\.0\.1:\d+ ended .* times in a row"),
    ):
        run(sampled(server))
    assert len(server.asked) == 1 + http_engine.FRUITLESS
    assert "try 1 of" in caplog.text


def test_a_stream_that_ends_early_is_continued_behind_its_tokens(run: Run[Any]) -> None:
    server = Server(
        b"data: " + told([3, 4]) + b"\n\n",
        b"",
        b"",
        b"data: " + told([5]) + b"\n\n" + LAST,
        b"",
        b"data: " + told([6], "stop") + b"\n\n" + LAST,
    )
    made = run(sampled(server))
    assert made.token_ids.tolist() == [3, 4, 5, 6]
    assert made.finish_reason == "stop"
    assert server.asked[2:] == [[9, 9, 3, 4]] * 3 + [[9, 9, 3, 4, 5]] * 2


FORMS = [
    b"data:%s\n\ndata:%s\n\ndata:[DONE]\n\n",
    b"data: %s\r\n\r\ndata: %s\r\n\r\ndata: [DONE]\r\n\r\n",
    b"data: %s\r\rdata: %s\r\rdata: [DONE]\r\r",
    b"\xef\xbb\xbf: hello\n\nid: 7\nevent: x\ndata: %s\n\n:\n\nretry: 3\ndata: %s\n\n",
    b"data: %s\n\ndata:\n\nunknown\ndata: %s\n\ndata: [DONE]\n\ndata: not read any more\n\n",
]


@pytest.mark.parametrize("form", FORMS)
def test_events_are_read_by_their_standard(run: Run[Any], form: bytes) -> None:
    made = run(sampled(Server(form % (told([3]), told([4, 5], "stop")))))
    assert made.token_ids.tolist() == [3, 4, 5]
    assert made.finish_reason == "stop"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_their_stream_is_cut(run: Run[Any], size: int) -> None:
    stream = b"data: a\r\ndata:  b\rdata\n\r\n:c\n\ndata:d\n\r\ndata: \xc3\xa4\n\ndata: lost\n"

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    async def read() -> list[bytes]:
        return [data async for data in event_data(chunks(), 1000)]

    assert run(read()) == [b"a\n b\n", b"d", "ä".encode()]


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b"{}",
        b"[]",
        b"\xff",
        b'{"choices": null}',
        b'{"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [NaN]}}]}',
        b'{"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [null]}}]}',
        b'{"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [1e999]}}]}',
        b'{"choices": [{"token_ids": [-1], "logprobs": {"token_logprobs": [-1.0]}}]}',
        b'{"choices": [{"token_ids": [3000000000], "logprobs": {"token_logprobs": [-1]}}]}',
        b'{"choices": [{"token_ids": [3]}]}',
        b'{"choices": [3]}',
        b'{"error": {"message": "out of memory"}}',
        b'{"error": ' + b"[" * 100_000,
    ],
)
def test_an_event_that_cannot_be_read_is_an_error_that_names_its_server(
    run: Run[Any], data: bytes
) -> None:
    server = Server(b"data: " + data + b"\n\n" + LAST)
    with pytest.raises(GenerationError, match=r"http://127\.0\.0\.1:\d+ "):
        run(sampled(server))
    assert len(server.asked) == 2


@pytest.mark.parametrize("models", [b"", b"<html>", b"[]", b'{"data": [{}]}', b'{"data": 1}'])
def test_a_server_of_another_kind_is_refused_by_its_url(run: Run[Any], models: bytes) -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:\d+/v1/models"):
        run(sampled(Server(models=models)))


def test_requests_wait_for_their_turns_and_a_refusal_is_no_part_without_tokens(
    run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine, "FRUITLESS", 1)
    server = Server(REFUSAL, REFUSAL, b"data: " + told([5], "stop") + b"\n\n")

    async def play(store: Store) -> Generation:
        async with server as url:
            engine = HttpEngine(HttpConfig(url=url, weights="static"), Path(), FIRST)
            engine.turns = Turns(store, CallLimit("hosted", at_once=1), "run engine", 10_000)
            await engine.start()
            try:
                prompt = np.array([9, 9], "<i4")
                return await engine.generate("g/0", prompt, SampleParams(max_tokens=8))
            finally:
                await engine.shutdown()

    with closing(Store("memory://")) as store:
        assert run(play(store)).token_ids.tolist() == [5]
    assert len(server.asked) == 1 + 2 + 1
