"""A worker whose engine writes a byte into a file for each token that it samples.

usage: python -m tests.pipeline.counting_worker URL RUN FILE TOKENS

The engine samples TOKENS tokens in all, then none until the process ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.engine import SimulatedConfig
from producer_workers.engines.base import Generation, GrowingResponse
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.judges.judge import FunctionJudge
from producer_workers.judges.watched_judges import WatchedJudges
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from tests.pipeline.judges import by_chance
from tests.pipeline.yard import FIRST, TASK, Letters


class CountingEngine(SimulatedEngine):
    """Samples a token of each request in turn, and writes it down first."""

    def __init__(self, config: SimulatedConfig, version: PolicyVersion, file: Path, most: int):
        super().__init__(config, version)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._left = most

    async def generate(self, request_id: str, prompt_ids: Any, params: SampleParams) -> Generation:
        response = GrowingResponse()
        while len(response.token_ids) < params.max_tokens:
            while not self._left:
                await asyncio.sleep(3600)
            self._left -= 1
            os.write(self._file, b".")
            response.add([7], [-0.5])
            await asyncio.sleep(0)
        response.stamp(self.version())
        response.finish("length")
        return response.generation()


async def work(url: str, name: str, file: Path, most: int) -> None:
    run = Run.open(Store(url, name="counting"), name)
    engine = CountingEngine(SimulatedConfig(), FIRST, file, most)
    judges = WatchedJudges()
    loop = SingleTurnAgentLoop(
        judge=judges.watch(FunctionJudge("chance", by_chance), 1.0),
        tokenizer=Letters(),
        eos_ids={100},
        partial_rollout=False,
    )
    await engine.start()
    await Worker(run, engine, {TASK: TaskRunner(loop, judges=judges)}, worker_id="killed").run()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
