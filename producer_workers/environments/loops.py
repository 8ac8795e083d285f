"""Agent loops that play environments of other packages through the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer.errors import ConfigError
from buffer.imports import require
from producer_workers.datasets.verifiers_tasks import REQUIREMENT as VERIFIERS
from producer_workers.environments.openenv import REQUIREMENT as OPENENV
from producer_workers.gateway.agents import AgentError, FunctionAgent
from producer_workers.gateway.loop import GatewayAgentLoop


class FailedEpisode(AgentError):
    """The environment failed, which is no reward of 0."""

    earned = None


class VerifiersAgentLoop(GatewayAgentLoop):
    """Plays tasks of an environment of verifiers, which a data set of this kind names."""

    def __init__(
        self,
        *,
        environment: str,
        environment_options: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        require("verifiers.v1", VERIFIERS)
        _check_not_resumable(given)
        options = {"environment": environment, "options": dict(environment_options or {})}
        play = "producer_workers.environments.verifiers:play"
        super().__init__(agent=play, agent_options=options, **given)


class OpenEnvAgentLoop(GatewayAgentLoop):
    """Plays episodes of an environment of OpenEnv, whose server is at `url`.

    `action`: the field of an action that is the model's text, or "module:function" that makes the
    action of the text and the last observation. `observation`: the field that the model reads, a
    text or chat messages, or "module:function" that makes these of an observation; "": all fields.
    `step_timeout_s` limits one answer of the server. `turn_rewards`: give each turn its reward,
    too, as token_rewards. `resumable`: an interrupted episode takes its actions again and goes on,
    where the environment answers them as before.
    """

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        observation: str = "",
        max_turns: int = 64,
        step_timeout_s: float = 120.0,
        turn_rewards: bool = False,
        time_limit_s: float = 600.0,
        **given: Any,
    ) -> None:
        require("openenv.core", OPENENV)
        options = {
            "url": url,
            "action": action,
            "observation": observation,
            "max_turns": max_turns,
            "step_timeout_s": step_timeout_s,
            "turn_rewards": turn_rewards,
        }
        play = "producer_workers.environments.openenv:play"
        super().__init__(agent=FunctionAgent(play, time_limit_s, options, FailedEpisode), **given)


class NemoGymAgentLoop(GatewayAgentLoop):
    """Runs rows by an agent of NeMo Gym, whose server is at `url`."""

    def __init__(self, *, url: str, **given: Any) -> None:
        _check_not_resumable(given)
        play = "producer_workers.environments.nemo_gym:play"
        super().__init__(agent=play, agent_options={"url": url.rstrip("/")}, **given)


def _check_not_resumable(options: Mapping[str, Any]) -> None:
    if options.get("resumable"):
        raise ConfigError("these episodes begin again: they cannot be resumable")
