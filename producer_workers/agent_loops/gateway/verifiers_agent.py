"""Environments of `verifiers` (0.1.14 to 0.3) as agents: each plays its own rollout, tools and all.

    # my_env.py; agent_loop = "gateway", agent_loop_options = { agent = "my_env:agent" }, judge = "environment"
    agent = verifiers_agent(vf.load_environment("wordle"))

Its rubric gives the reward: "score", and each of its metrics by name. 0.4 has no such environments any more: its agents
are programs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from buffer.errors import ConfigError
from producer_workers.agent_loops.gateway.runner import AgentTask


def verifiers_agent(environment: Any) -> Callable[[AgentTask], Awaitable[dict[str, float]]]:
    """The agent that plays `environment`, one of verifiers. Raises ConfigError for what is none that it knows."""
    if not hasattr(environment, "rollout") or not hasattr(environment, "rubric"):
        hint = "one of vf.load_environment, of verifiers 0.1.14 to 0.3"
        raise ConfigError(f"{type(environment).__name__} has no rollout and rubric", hint=hint)

    async def play(task: AgentTask) -> dict[str, float]:
        async with import_module("openai").AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as asks:
            client = import_module("verifiers.clients").OpenAIChatCompletionsClient(asks)
            state = await environment.rollout(_row(task), client, task.model, {})
        if state.get("error") is not None:
            raise state["error"]
        await environment.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return metrics | {"score": float(state["reward"])}

    return play


def _row(task: AgentTask) -> dict[str, Any]:
    """A problem as a row of an environment's data set."""
    return {"prompt": task.messages, "answer": task.ground_truth, "info": task.extra, "example_id": 0}
