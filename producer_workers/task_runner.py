"""How a worker treats the groups of one task: the agent loop, and what becomes of what it makes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from buffer.errors import GroupTimeout
from buffer.rollout import RolloutState
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.loop_result import check_result
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
        given = [state.index for state in states]
        try:
            async with asyncio.timeout(self.group_time_limit_s) as limit:
                made = await self.agent_loop.generate_group(states, engine, gid)
            return check_result(given, made)
        except BaseExceptionGroup as errors:  # of a loop that has a TaskGroup
            raise _one_of(errors) from errors
        except TimeoutError as error:
            if not limit.expired():
                raise
            hint = "see [strategy] group_time_limit_s"
            raise GroupTimeout(f"{gid} took longer than {self.group_time_limit_s:g} s", hint=hint) from error

    async def is_valid(self, states: list[RolloutState]) -> bool:
        """Whether a completed group is worth training on. What the user's function raises fails the group."""
        return self.is_valid_sample is None or bool(await asyncio.to_thread(self.is_valid_sample, states))


def _one_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to raise for several: that the engine died is the worker's matter, whatever else went wrong."""
    found: BaseException = errors.subgroup(EngineDeadError) or errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
