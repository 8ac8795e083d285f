"""Agent loops that play environments of other packages through the gateway."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from buffer.errors import ConfigError
from buffer.imports import load_object, require
from rolloutmq.extensions.environments.harbor import HarborAgent
from rolloutmq.extensions.environments.openenv import REQUIREMENT as OPENENV
from rolloutmq.extensions.environments.rows import REQUIREMENT as VERIFIERS
from rolloutmq.extensions.gateway.agents import AgentError, FunctionAgent
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop


class FailedEpisode(AgentError):
    """The environment failed, which is no reward of 0."""

    earned = None


class EpisodeLoop(GatewayAgentLoop):
    """Plays episodes with the function at `play`, whose keyword arguments are its options."""

    play: ClassVar[str]
    error: ClassVar[type[AgentError]] = AgentError
    can_resume: ClassVar[bool] = False

    def __init__(self, *, time_limit_s: float = 600.0, **given: Any) -> None:
        for module, requirement in self.needs.items():
            require(module, requirement)
        if given.get("resumable") and not self.can_resume:
            raise ConfigError("these episodes begin again: they cannot be resumable")
        function = load_object(self.play, kind="agent")
        options = _take_arguments(function, given)
        inspect.signature(function).bind(None, **options)
        agent = FunctionAgent(self.play, time_limit_s, options, self.error)
        super().__init__(agent=agent, **given)


class VerifiersAgentLoop(EpisodeLoop):
    """Plays tasks of an environment of verifiers, which a data set of this kind names."""

    play = "rolloutmq.extensions.environments.verifiers:play"
    needs: ClassVar[Mapping[str, str]] = {**EpisodeLoop.needs, "verifiers.v1": VERIFIERS}


class OpenEnvAgentLoop(EpisodeLoop):
    """Plays episodes of an environment of OpenEnv.

    `resumable`: an interrupted episode takes its actions again and goes on, where the environment
    answers them as before.
    """

    play = "rolloutmq.extensions.environments.openenv:play"
    needs: ClassVar[Mapping[str, str]] = {**EpisodeLoop.needs, "openenv.core": OPENENV}
    error = FailedEpisode
    can_resume = True


class NemoGymAgentLoop(EpisodeLoop):
    """Runs rows by an agent of NeMo Gym."""

    play = "rolloutmq.extensions.environments.nemo_gym:play"


class HarborAgentLoop(GatewayAgentLoop):
    """Runs a trial of Harbor for each rollout, with the options of HarborAgent."""

    def __init__(self, **given: Any) -> None:
        self._harbor = HarborAgent(**_take_arguments(HarborAgent, given))
        super().__init__(agent=self._harbor, **given)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if a worker on this machine could not use `agent_loop_options`."""
        try:
            agent = HarborAgent(**{key: options[key] for key in options if key != "parser"})
        except TypeError as error:
            raise ConfigError(f"agent_loop_options: {error}") from error
        agent.check()

    async def close(self) -> None:
        await super().close()
        await self._harbor.processes.ended()


def _take_arguments(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of a function from `given`, and return them."""
    return {name: given.pop(name) for name in inspect.signature(function).parameters & given.keys()}
