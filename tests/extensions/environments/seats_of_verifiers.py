# mypy: ignore-errors
"""An environment of verifiers 0.4: two solvers, whom a critic hears that is not trained."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Seats"]


class SeatsConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class Seats(vf.Env[SeatsConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(2):
            await agents.solver.run(task)
        await agents.critic.run(task)
