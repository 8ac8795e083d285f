# mypy: ignore-errors
"""A taskset of verifiers 0.4, whose agent asks once, and once more if it was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["AskTwice", "Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    sums: int = 3
    endless: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self) -> Iterator[SumTask]:
        for number in count() if self.config.endless else range(self.config.sums):
            data = SumData(prompt=f"{number} + 1?", system_prompt="Add.", answer=str(number + 1))
            yield SumTask(data, self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> Any:
        messages: list[Any] = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _again in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = reply.choices[0].message
                if data.answer in str(said.content):
                    break
                messages += [said.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": "Are you sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
