"""A worker process whose resumable agents talk for some turns; a test tells it when to kill itself.

`death` is "sampled N" (the engine has made turn N of this process, and nobody has it yet), "told N"
(an agent has got it), or "never". What the engine made, and what agents got, is in files of FOLDER.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.sampling import SampleParams
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.producing import WorkerSection
from producer_workers.engines.base import Generation
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop
from rolloutmq.testing import END, Characters
from tests.pipeline.yard import FIRST, TASK

TURNS = 3  # of each agent


class Mortal:
    """Writes what happens to a file, and kills this process at `death`."""

    def __init__(self, folder: Path, death: str) -> None:
        self._folder = folder
        self._death = death
        self._counts = {"sampled": 0, "kept": 0, "told": 0}

    def note(self, kind: str, fact: Any) -> None:
        with (self._folder / kind).open("ab") as file:
            file.write(orjson.dumps(fact) + b"\n")
        self._counts[kind] += 1
        if self._death == f"{kind} {self._counts[kind]}":
            os.kill(os.getpid(), signal.SIGKILL)


class Engine(SimulatedEngine):
    mortal: Mortal

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        made = await super().generate(request_id, prompt_ids, params)
        self.mortal.note("sampled", [prompt_ids.tolist(), made.token_ids.tolist()])
        return made


async def start_engine(mortal: Mortal) -> Engine:
    config = SimulatedConfig(
        first_token_s=Fixed(value=0.0),
        token_s=Fixed(value=0.001),
        response_tokens=Fixed(value=5),
        vocab_size=95,
        seed=int.from_bytes(os.urandom(4)),
    )
    engine = Engine(config, FIRST)
    engine.mortal = mortal
    await engine.start()
    return engine


async def start_worker(run: Run, name: str, mortal: Mortal) -> Worker:
    async def talk(task: AgentTask) -> dict[str, float]:
        messages: list[Any] = task.finished[-1] if task.finished else list(task.messages)
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            while sum(message["role"] == "assistant" for message in messages) < TURNS:
                if messages[-1]["role"] == "assistant":
                    messages = [*messages, {"role": "user", "content": "and?"}]
                url = f"{task.base_url}/chat/completions"
                async with http.post(url, json={"messages": messages, "max_tokens": 8}) as reply:
                    said = await reply.json()
                assert reply.status == 200, said
                messages = [*messages, said["choices"][0]["message"]]
                mortal.note("told", [task.session_id, messages[-1]["content"]])
        return {"score": 1.0}

    engine = await start_engine(mortal)
    loop = GatewayAgentLoop(
        judge=None, tokenizer=Characters(), eos_ids={END}, partial_rollout=True, agent=talk,
        resumable=True, parser="",
    )  # fmt: skip
    tasks = {TASK: TaskRunner(loop, partial_rollout=True)}
    return Worker(run, engine, tasks, WorkerSection(concurrency=1), worker_id=name)


async def main(url: str, name: str, worker: str, folder: str, death: str) -> None:
    run = Run.open(Store(url), name)
    made = await start_worker(run, worker, Mortal(Path(folder), death))
    task = asyncio.create_task(made.run())
    while run.progress(TASK).get("produced_groups", "0") == "0":
        await asyncio.sleep(0.05)
    made.stop()
    await task


def live(*words: str) -> None:
    asyncio.run(main(*words))
