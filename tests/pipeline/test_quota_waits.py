"""A wait for a quota is no working time of a group, and uses up no try."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from buffer.control.call_limit import CallLimit
from buffer.control.control import Mode
from buffer.ids import new_nonce
from buffer.wire.rollout import RolloutState
from buffer.wire.sampling import SampleParams
from producer_workers.call_turns import Turns
from producer_workers.config.call_limit import LimitSection
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.task import JudgingSection
from producer_workers.engines.base import Generation, PauseMode
from producer_workers.judges.judge import FunctionJudge
from producer_workers.judges.load import HttpJudge
from rolloutmq.extensions.gateway.live.loop import LiveAgentLoop
from rolloutmq.extensions.gateway.live.room import LiveRoom
from rolloutmq.extensions.gateway.live.secret import Secret
from rolloutmq.extensions.gateway.live.server import LiveGateway
from rolloutmq.extensions.gateway.section import GatewaySection
from rolloutmq.testing import END, Characters
from rolloutmq.views.explain import symptom
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.explain.symptom import Symptom
from rolloutmq.views.run_view import read_run_view
from tests.pipeline.yard import FIRST, TASK, WatchedEngine, Yard
from tests.producer_workers.http_service import http_service

LIMIT_S = 2.0


def score(*, response: str, ground_truth: object, state: RolloutState) -> float:
    return 1.0


@asynccontextmanager
async def taken_quota(yard: Yard) -> AsyncIterator[tuple[Turns, AsyncExitStack]]:
    """Yield turns that wait until another caller's call is closed."""
    limit = CallLimit(new_nonce(), at_once=1)
    holder, turns = (Turns(yard.store, limit, f"run {n}", 60_000) for n in "ab")
    async with AsyncExitStack() as held:
        await held.enter_async_context(holder.turn())
        yield turns, held


async def test_a_group_whose_judge_waits_longer_than_its_time_limit_is_completed(
    yard: Yard,
) -> None:
    yard.enqueue(1)
    async with taken_quota(yard) as (turns, held):
        judge = FunctionJudge("test", score).under(turns)
        async with yard.working(yard.worker(judge=judge, group_time_limit_s=LIMIT_S)):
            await yard.until(lambda: len(turns.waiting) == 2)
            await asyncio.sleep(1.5 * LIMIT_S)
            await held.aclose()
            await yard.until_stages(completed=1)
    assert "failed" not in yard.counters()
    yard.check()


async def test_a_service_that_refuses_every_call_is_named_by_status(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symptom, "PATIENCE_MS", 100)
    name = new_nonce()
    turns = Turns(yard.store, CallLimit(name, requests_per_minute=600), "run task", 60_000)
    yard.enqueue(1)

    def found() -> Symptom | None:
        named = {each.name: each for each in diagnose(read_run_view(yard.run))}
        return named.get("worker/quota")

    with http_service(lambda *_: (429, b"no money")) as url:
        judge = HttpJudge(url, JudgingSection()).under(turns)
        async with yard.working(yard.worker(judge=judge)):
            await yard.until(lambda: (each := found()) and each.level == "stuck")
            seen = found()
    assert seen
    assert f"{name} (600 requests a minute), whose service refuses every call" in seen.what


class HostedEngine(WatchedEngine):
    """An engine whose requests have a quota. A pause ends those that wait for their turns."""

    turns: Turns

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config, FIRST)
        self._parts = set[asyncio.Task[Generation]]()

    async def generate(self, request_id: str, prompt_ids: Any, params: SampleParams) -> Generation:
        part = asyncio.create_task(self._in_turn(request_id, prompt_ids, params))
        self._parts.add(part)
        await asyncio.wait({part})
        self._parts.discard(part)
        if part.cancelled():
            return Generation(np.empty(0, "<i4"), np.empty(0, "<f4"), (), "abort")
        return part.result()

    async def _in_turn(self, request_id: str, *asked: Any) -> Generation:
        async with self.turns.turn(request=request_id):
            return await super().generate(request_id, *asked)

    async def pause(self, mode: PauseMode) -> None:
        for part in self._parts:
            part.cancel()
        await super().pause(mode)


async def test_a_live_session_that_waits_longer_than_its_limit_goes_on_also_after_a_pause(
    yard: Yard, tmp_path: Path
) -> None:
    tokens = Fixed(value=5)
    config = SimulatedConfig(first_token_s=Fixed(value=0.0), response_tokens=tokens, vocab_size=95)
    engine = HostedEngine(config)
    question = [{"role": "user", "content": "drawn"}]
    params = SampleParams(max_tokens=200, seed=1)
    yard.enqueue_states(
        [RolloutState(index=0, messages=question, prompt_ids=np.arange(3), sample_params=params)]
    )
    room = LiveRoom(Secret.read(tmp_path / "key", yard.run.nonce), LIMIT_S)
    gateway = LiveGateway(GatewaySection(), room, yard.run, (TASK,))
    loop = LiveAgentLoop(
        judge=None, tokenizer=Characters(), eos_ids={END}, partial_rollout=True, parser="",
        gateway=gateway,
    )  # fmt: skip
    worker = yard.worker(engine=engine, loop=lambda **_: loop, partial_rollout=True)
    await gateway.start()
    url = gateway.url.removesuffix("/v1")
    key = room.secret.admin_key

    async def post(path: str, body: Any) -> Any:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
            http.post(url + path, json=body) as answer,
        ):
            return await answer.json()

    async with taken_quota(yard) as (engine.turns, held), yard.working(worker):
        opened = await post("/sessions", {})
        (key,) = (each["key"] for each in opened["sessions"])
        asking = asyncio.create_task(post("/v1/chat/completions", {"messages": question}))
        await yard.until(lambda: len(engine.turns.waiting) == 1)
        await asyncio.sleep(1.5 * LIMIT_S)
        assert yard.stages() == {"running": 1}
        yard.control(Mode.ABORT)
        await yard.until_stages(aborted=1)
        yard.control(Mode.RUN)
        assert yard.reissue() == 1
        await yard.until(lambda: len(engine.turns.waiting) == 1)
        await held.aclose()
        assert "choices" in await asking
        assert await post(f"/sessions/{key}/reward", {"score": 1.0}) == {"status": "ended"}
        await yard.until_stages(completed=1)
    yard.check()


def test_services_with_long_names_have_a_quota_each(make_yard: Callable[..., Yard]) -> None:
    run, section = make_yard().run, LimitSection(at_once=1)
    hosts = [f"{first}.{'x' * 63}.example" for first in "ab"]
    names = {section.turns(run, TASK, f"https://{host}/v1").limit.name for host in hosts}
    assert len(names) == 2
