from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from buffer.errors import JudgeError, ModelError, RolloutMQError
from buffer.redis.retry import Backoff
from producer_workers.config.task import JudgingSection
from producer_workers.engines.base import Scores
from rolloutmq.extensions.teacher import model as models
from rolloutmq.extensions.teacher.model import Served
from rolloutmq.extensions.teacher.settings import all_teachers
from tests.extensions.teacher.scorer import TASK, config_of
from tests.producer_workers.engines.conformance import TOLERANCE
from tests.producer_workers.engines.tiny_model import reference_distribution, write_tiny_model
from tests.producer_workers.engines.vllm_server import vllm_server

TEXT = np.array([5, 6, 7, 8], "<i4")
QUICK = JudgingSection(timeout_s=60.0, retries=1)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSES", "AWAY_PAUSES"):
        monkeypatch.setattr(models, name, Backoff(0.01, 0.01))


@dataclass
class Teacher:
    """Answers as vLLM does, with logprob -id for each token; first with the statuses `refusals`."""

    tokenizer: Any
    refusals: list[int] = field(default_factory=list)
    context: int = 1000
    asked: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/tokenize", self._tokenize)
        application.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big", "max_model_len": self.context}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": self.tokenizer.encode(text, add_special_tokens=False)})

    async def _complete(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.asked.append(body)
        if self.refusals and len(self.asked) > 1:  # the probe
            return web.Response(status=self.refusals.pop(0), text="not now")
        rows = [{str(id): {"logprob": -id, "rank": 1}} for id in body["prompt"]]
        return web.json_response({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]})


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def served(url: str, student: Path, **more: Any) -> Served:
    config = config_of(student, {"big": {"engine": {"kind": "http", "url": url}, **more}})
    return Served("big", all_teachers(config)["big"], config, [TASK])


async def scored(model: Served, judging: JudgingSection = QUICK) -> Scores:
    try:
        await model.open()
        return await model.score(TEXT, 2, 0, judging)
    finally:
        await model.close()


def test_a_server_that_has_no_room_is_waited_for_and_other_failures_are_tried_again(
    tiny_model: Path,
) -> None:
    teacher = Teacher(tokenizer_of(tiny_model), [429, 503, 502, 500, 504])

    async def scenario() -> Scores:
        async with teacher.at_work() as url:
            return await scored(served(url, tiny_model))

    assert asyncio.run(scenario()).logprobs.tolist() == [-7.0, -8.0]
    assert [each["prompt"] for each in teacher.asked[1:]] == [TEXT.tolist()] * 6


@pytest.mark.parametrize(("refusals", "asked"), [([500, 500], 2), ([400], 1), ([404], 1)])
def test_a_server_that_refuses_fails_the_call_by_name_after_its_retries(
    tiny_model: Path, refusals: list[int], asked: int
) -> None:
    teacher = Teacher(tokenizer_of(tiny_model), list(refusals))

    async def scenario() -> None:
        async with teacher.at_work() as url:
            await scored(served(url, tiny_model))

    with pytest.raises(JudgeError, match=f"teacher big: .*{refusals[-1]}"):
        asyncio.run(scenario())
    assert len(teacher.asked) == 1 + asked


def test_a_server_that_is_away_at_the_start_and_later_is_waited_for(tiny_model: Path) -> None:
    teacher = Teacher(tokenizer_of(tiny_model))

    async def scenario() -> list[Scores]:
        async with teacher.at_work() as url:
            pass
        model = served(url, tiny_model)
        await model.open()
        found = []
        for _ in range(2):
            asking = asyncio.create_task(model.score(TEXT, 2, 0, QUICK))
            done, _ = await asyncio.wait({asking}, timeout=0.2)
            assert not done
            async with teacher.at_work():
                found.append(await asking)
        await model.close()
        return found

    assert [each.logprobs.tolist() for each in asyncio.run(scenario())] == [[-7.0, -8.0]] * 2


def test_a_server_that_cannot_score_the_student_is_refused_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    other = Path(tmp_path / "other")
    own = tokenizer_of(tiny_model)
    document = orjson.loads((tiny_model / "tokenizer.json").read_bytes())
    vocabulary = document["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[60:62]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    own.save_pretrained(other)
    (other / "tokenizer.json").write_bytes(orjson.dumps(document))

    async def refusal(teacher: Teacher, **more: Any) -> RolloutMQError:
        async with teacher.at_work() as url:
            with pytest.raises(RolloutMQError) as error:
                await scored(served(url, tiny_model, **more))
        return error.value

    async def scenario() -> None:
        error = await refusal(Teacher(tokenizer_of(other)))
        assert isinstance(error, ModelError)
        assert "teacher big has another tokenizer" in error.message
        error = await refusal(Teacher(own), model=str(other))
        assert "teacher big has another tokenizer: token 60 is" in error.message
        error = await refusal(Teacher(own, context=8))
        assert "teacher big: task sums" in error.message

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.vllm
def test_scores_of_a_vllm_server_equal_a_forward_pass(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "big", seed=1)
    text = np.random.default_rng(1).integers(4, 90, 300, dtype=np.int32)
    expected = reference_distribution(folder, text.tolist())[36:-1]

    async def scenario(url: str) -> Scores:
        model = served(url, folder, top_k=5)
        try:
            await model.open()
            return await model.score(text, 37, 5, QUICK)
        finally:
            await model.close()

    with vllm_server(folder, ["--max-logprobs", "20"]) as url:
        made = asyncio.run(scenario(url))
    own = expected[np.arange(len(text) - 37), text[37:]]
    assert np.abs(made.logprobs - own).max() < TOLERANCE
    assert np.abs(made.top_logprobs - np.sort(expected)[:, ::-1][:, :5]).max() < TOLERANCE
