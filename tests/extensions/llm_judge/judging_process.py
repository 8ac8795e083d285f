"""`python -m tests.extensions.llm_judge.judging_process STORE RUN API`: judges until it is killed."""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from buffer.groups.verdicts import Verdicts
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from rolloutmq.extensions.llm_judge.section import LlmSection

AT_ONCE = 4


async def judge(store: str, run: str, url: str) -> None:
    section = LlmSection.model_validate({"url": url, "model": "m", "repeat_share": 0.0})
    judge = section.scorer(JudgingSection())
    judge.verdicts = Verdicts(Run.open(Store(store), run).context, "math")
    numbers = count()

    async def call() -> None:
        for number in numbers:
            await judge.judge(RolloutState(response=str(number)))

    await asyncio.gather(*(call() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(judge(*sys.argv[1:]))
