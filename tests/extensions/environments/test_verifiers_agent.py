from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from buffer.wire.rollout import RolloutState, Status
from rolloutmq.extensions.environments.verifiers import EpisodePlayer
from tests.producer_workers.recorder import Recorder, loop_of, questions


class EpisodeEnvironment:
    """An environment of verifiers 0.4, whose package needs another version of openai.

    Its agents are programs.
    """

    class Data(BaseModel):
        prompt: str
        answer: str

    class Task:
        def __init__(self, data: Any, config: Any) -> None:
            self.data = data

        @classmethod
        def data_type(cls) -> Any:
            return EpisodeEnvironment.Data

    def __init__(self) -> None:
        self.taskset = self
        self.config = SimpleNamespace(taskset=SimpleNamespace(task=None))
        self.open = 0
        self.opened = 0

    @classmethod
    def task_type(cls) -> Any:
        return cls.Task

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        assert self.open == 0, "one at a time: it keeps what it serves in itself"
        self.open = 1
        self.opened = self.opened + 1
        yield
        await asyncio.sleep(0)
        self.open = 0

    async def run_episode(self, task: Any, context: Any, on_trace: Any) -> Any:
        assert self.open == 1
        key = os.environ[context.client.api_key_var]
        agent = SimpleNamespace(trainable=True, name="agent")
        trace = SimpleNamespace(id=token_hex(16), agent=agent, metrics={"turns": 1, "none": None})
        on_trace(trace)
        async with openai.AsyncOpenAI(
            base_url=context.client.base_url,
            api_key=key,
            default_headers={"X-Session-ID": trace.id},
        ) as client:
            messages: list[Any] = [{"role": "user", "content": task.data.prompt}]
            reply = await client.chat.completions.create(model=context.model, messages=messages)
        no_rubric = SimpleNamespace(type="TaskError", message="no rubric")
        trace.errors = [no_rubric] if task.data.answer == "?" else []
        trace.reward = float(task.data.answer in str(reply.choices[0].message.content))
        return SimpleNamespace(ok=not trace.errors, traces=[trace], errors=[])


def test_an_environment_whose_agents_are_programs_is_served_while_rollouts_run(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {
        name: SimpleNamespace for name in ("EvalClientConfig", "ModelContext", "SamplingConfig")
    }
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verifiers.v1", SimpleNamespace(**kinds))
    environment = EpisodeEnvironment()
    engine = Recorder(chat, ["it is 5"] * 6)
    agent = EpisodePlayer(environment).play

    async def scene() -> list[RolloutState]:
        groups = []
        for answers in ("55", "5?"):
            given = questions("2 + 3?", "2 + 3?")
            for state, answer in zip(given, answers, strict=True):
                state.extra = {"prompt": "2 + 3?", "answer": answer}
            groups += await loop_of(chat, agent=agent).generate_group(
                given, engine, "math-0000000001"
            )
        return groups

    states = asyncio.run(scene())
    assert [state.reward for state in states[:3]] == [{"score": 1.0, "turns": 1.0}] * 3
    assert states[3].status is Status.FAILED
    assert "TaskError: no rubric" in str(states[3].error)
    assert environment.open == 0
    assert environment.opened >= 2, "no longer than a group plays"
    assert not [name for name in os.environ if name.startswith("ROLLOUTMQ_SESSION_")]
