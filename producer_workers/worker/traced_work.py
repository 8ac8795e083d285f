"""Reports a worker's time between claim and submit to a tracer: generate, and judge within it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from buffer.monitoring.tracing import Tracer
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine
from producer_workers.judges.judge_times import JudgeTimes


class TracedLoop:
    """An agent loop whose time for each group is a span."""

    def __init__(self, loop: AgentLoop, tracer: Tracer) -> None:
        self._loop = loop
        self._tracer = tracer
        self.makes_prompts = getattr(loop, "makes_prompts", False)

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """Generate and judge one group, see `AgentLoop`."""
        weights = str(engine.version())
        with self._tracer.during(
            "generate", gid, rollouts=len(states), engine=engine.name, weights=weights
        ):
            return await self._loop.generate_group(states, engine, gid)

    async def close(self) -> None:
        """Close the agent loop, where it can be closed."""
        close = getattr(self._loop, "close", None)
        if inspect.iscoroutinefunction(close):
            await close()


class TracedJudgeTimes(JudgeTimes):
    """Judge times whose every answer is a span within the group's `generate`."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure one answer, and trace it."""
        with self._tracer.child("judge"), super().measure():
            yield
