"""How a worker treats the groups of one task: the agent loop, and what becomes of what it makes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from buffer.errors import GroupTimeout
from buffer.rollout import RolloutState
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine
from producer_workers.sample_filters import SampleFilter


@dataclass(frozen=True, slots=True)
class TaskRunner:
    """`is_valid_sample` None accepts every completed group; `group_time_limit_s` None waits for ever."""

    agent_loop: AgentLoop
    partial_rollout: bool = False
    is_valid_sample: SampleFilter | None = None
    group_time_limit_s: float | None = None

    async def generate(self, states: list[RolloutState], engine: Engine, gid: str) -> list[RolloutState]:
        """See `AgentLoop.generate_group`. Raises GroupTimeout when the time is up; its requests are aborted then."""
        try:
            async with asyncio.timeout(self.group_time_limit_s) as limit:
                return await self.agent_loop.generate_group(states, engine, gid)
        except TimeoutError as error:
            if not limit.expired():
                raise
            hint = "see [strategy] group_time_limit_s"
            raise GroupTimeout(f"{gid} took longer than {self.group_time_limit_s:g} s", hint=hint) from error

    async def is_valid(self, states: list[RolloutState]) -> bool:
        """Whether a completed group is worth training on. What the user's function raises fails the group."""
        return self.is_valid_sample is None or bool(await asyncio.to_thread(self.is_valid_sample, states))
