from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.control.progress import TaskProgress
from buffer.errors import RolloutMQError
from buffer.wire.rollout import RolloutState, Status, ToolCall
from producer_workers.agent_loops.environment import ContainedEnvironment, Turn
from producer_workers.agent_loops.toolbox import Toolbox
from producer_workers.build import _make_filter
from producer_workers.config.dataset import PythonSection
from producer_workers.config.task import JudgingSection
from producer_workers.datasets.open import open_dataset
from producer_workers.judges.load import load_worker_judge
from producer_workers.judges.watched_judges import WatchedJudges
from producer_workers.producer.strategy import continue_call
from producer_workers.user_code.process_function import REPLACED
from rolloutmq.extensions.gateway.agents import AgentTask, FunctionAgent
from tests.producer_workers.user_code import deeds

MINE = deeds.__name__
LIMIT_S = 3.0
JUDGING = JudgingSection(timeout_s=LIMIT_S, processes=2)

Call = Callable[[str], Awaitable[Any]]
"""Makes a call that does the deed of that name, and returns its result."""


def rollout(deed: str) -> RolloutState:
    return RolloutState(
        status=Status.INIT,
        messages=[{"role": "user", "content": "?"}],
        prompt_ids=np.arange(3, dtype="<i4"),
        response="an answer",
        response_ids=np.array([10, 20], "<i4"),
        logprobs=np.array([-1.0, -2.0], "<f4"),
        finish_reason="stop",
        ground_truth=deed,
        reward={"score": 1.0},
    )


@asynccontextmanager
async def judging(name: str) -> AsyncIterator[Call]:
    judges = WatchedJudges()
    judge: Any = judges.watch(load_worker_judge(f"{MINE}:{name}", JUDGING), 10.0)
    try:
        yield lambda deed: judge.judge(rollout(deed))
    finally:
        judges.close()


@asynccontextmanager
async def filtering(name: str) -> AsyncIterator[Call]:
    judges = WatchedJudges()
    keeps = _make_filter(f"{MINE}:{name}", JUDGING, judges)
    try:
        yield lambda deed: keeps([rollout(deed)])
    finally:
        judges.close()


@asynccontextmanager
async def using(name: str) -> AsyncIterator[Call]:
    toolbox = Toolbox([f"{MINE}:{name}"], call_timeout_s=LIMIT_S, processes=2)

    async def call(deed: str) -> str:
        asked = ToolCall(id="0", name=name, arguments={"deed": deed})
        (text,) = await toolbox.call_all([asked])
        if text.startswith("error: "):
            raise RolloutMQError(f"{name}: {text}")  # told to the model
        return text

    try:
        yield call
    finally:
        await toolbox.close()


@asynccontextmanager
async def playing(name: str) -> AsyncIterator[Call]:
    world = ContainedEnvironment(f"{MINE}:{name}", LIMIT_S, processes=2, memory_mb=4096)
    try:
        yield lambda deed: world.answer(rollout(deed), Turn(0, "hello"))
    finally:
        await world.close()


@asynccontextmanager
async def acting(name: str) -> AsyncIterator[Call]:
    agent = FunctionAgent(f"{MINE}:{name}", LIMIT_S)
    try:
        yield lambda deed: agent.run(lambda: AgentTask("", "", [], ground_truth=deed))
    finally:
        agent.close()


@asynccontextmanager
async def reading(name: str, folder: Path) -> AsyncIterator[Call]:
    rows = ["fine", *deeds.DEEDS]
    section = PythonSection(
        kind="python",
        factory=f"{MINE}:rows",
        options={"answers": rows},
        record=f"{MINE}:{name}",
        row_timeout_s=LIMIT_S,
    )
    dataset = await asyncio.to_thread(open_dataset, section, folder)

    yield lambda deed: asyncio.to_thread(dataset.row, rows.index(deed))


@asynccontextmanager
async def deciding(name: str) -> AsyncIterator[Call]:
    called = continue_call(f"{MINE}:{name}", getattr(deeds, name))

    def call(deed: str) -> Any:
        return called(1, 2, progress=TaskProgress(stopped=deed))

    yield lambda deed: asyncio.to_thread(call, deed)


KINDS: dict[str, Any] = {
    "judge": judging, "judge_later": judging, "keep": filtering, "tool": using, "tool_later": using,
    "World": playing, "agent": acting, "agent_later": acting, "record": reading, "go_on": deciding,
}  # fmt: skip
WAYS = {"judge", "agent_later", "go_on"}
"""Waited for in a loop, alone, and in a thread: the others are slow."""
ANY_RESULT = {"tool", "tool_later", "go_on"}
"""What they return is made a text, or a yes or no, whatever it is."""
HARMLESS = {("keep", "odd")}
"""A number that is true."""


@pytest.mark.parametrize(
    "name", [name if name in WAYS else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
async def test_whatever_a_function_does_fails_its_call_alone_and_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer_workers.producer.strategy.LIMIT_S", LIMIT_S)
    given = (name, tmp_path) if name == "record" else (name,)
    REPLACED.clear()
    async with KINDS[name](*given) as call:
        assert await call("fine")
        for deed in deeds.DEEDS:
            if (deed in deeds.RUBBISH and name in ANY_RESULT) or (name, deed) in HARMLESS:
                continue
            with pytest.raises(RolloutMQError) as caught:
                await call(deed)
            check(name, deed, caught.value)
        assert await call("fine"), "a good call succeeds after all of them"
    # a hang, a crash and an exit at least, none of which may go unseen
    assert sum(REPLACED.values()) >= len(deeds.ENDS)


def check(name: str, deed: str, error: RolloutMQError) -> None:
    said = str(error)
    assert (f"row {1 + list(deeds.DEEDS).index(deed)}" if name == "record" else name) in said
    if deed in deeds.ENDS:
        assert f"ended its process: {deed}" in said
    elif deed in deeds.RAISED and deed != "MemoryError":
        assert deed in said
    elif deed in deeds.HANGS:
        assert f"{LIMIT_S:g} s" in said
