"""Run environments of `verifiers` 0.4 as agents, which play their rollouts themselves.

The environment gives the reward: "score", and each metric by name. A problem has
`task.data.model_dump(mode="json")` of a task as its `extra`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from secrets import token_hex
from typing import Any

import orjson

from buffer.errors import RolloutMQError
from buffer.imports import import_package
from rolloutmq.extensions.environments.rows import REQUIREMENT, environment_config
from rolloutmq.extensions.gateway.agents import BY_HEADER, AgentTask

log = logging.getLogger("rolloutmq.worker")

STOP_S = 60.0  # for the servers and tools of an environment to stop before they start again

# By the id of a trace; None for those that are not trained.
Rewards = dict[str, dict[str, Any] | None]


class EpisodeError(RolloutMQError):
    """The episode failed or gave no reward."""


async def play(
    task: AgentTask, *, environment: str, options: Mapping[str, Any] | None = None
) -> Rewards:
    """Play a task of a data set of kind "verifiers". Raises ConfigError, EpisodeError."""
    return await _player_of(environment, orjson.dumps(options or {})).play(task)


@cache
def _player_of(environment: str, options: bytes) -> EpisodePlayer:
    config = environment_config(environment, orjson.loads(options))
    vf = import_package("verifiers.v1", REQUIREMENT)
    return EpisodePlayer(vf.load_environment(config))


def _reward(trace: Any) -> dict[str, Any]:
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    seat = trace.agent.name
    # "agent" is the only seat of an environment that names none
    role = {"role": "" if seat == "agent" else seat}
    return metrics | {"score": float(trace.reward)} | role


class EpisodePlayer:
    """Plays an environment, whose servers and tools run while any rollout does."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._playing = 0
        self._server: asyncio.Task[None] | None = None

    async def play(self, task: AgentTask) -> Rewards:
        rewards: Rewards = {}
        async with self._served():
            episode = await self._ask(task, lambda trace: rewards.update({trace.id: None}))
        if not episode.ok:
            errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error was recorded"
            raise EpisodeError(why)
        return rewards | {
            trace.id: _reward(trace) if trace.agent.trainable else None for trace in episode.traces
        }

    async def _ask(self, task: AgentTask, began: Callable[[Any], None]) -> Any:
        vf = import_package("verifiers.v1", REQUIREMENT)
        kind = type(self._environment.taskset).task_type()
        data = kind.data_type().model_validate(task.extra or {"prompt": task.question})
        theirs = kind(data, self._environment.config.taskset.task)
        variable = f"ROLLOUTMQ_SESSION_{token_hex(8)}"
        # the client takes the name of a variable, not a key, and sends a trace's id in a header
        os.environ[variable] = task.role(BY_HEADER).api_key
        try:
            client = vf.EvalClientConfig(base_url=task.base_url, api_key_var=variable)
            context = vf.ModelContext(client=client, model=task.model, sampling=vf.SamplingConfig())
            return await self._environment.run_episode(theirs, context, on_trace=began)
        finally:
            del os.environ[variable]

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        self._playing += 1
        if self._playing == 1:
            self._closing = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(
                self._serve(self._server, self._ready, self._closing)
            )
        try:
            await asyncio.shield(self._ready)
            yield
        finally:
            self._playing -= 1
            if not self._playing:
                self._closing.set()

    async def _serve(
        self, before: asyncio.Task[None] | None, ready: asyncio.Future[None], closing: asyncio.Event
    ) -> None:
        """Serve in its own task, which its scopes may not leave, after the one `before`."""
        try:
            if before is not None and not before.done():
                _, hanging = await asyncio.wait({before}, timeout=STOP_S)
                if hanging:
                    log.error("servers of an environment did not stop within %g s", STOP_S)
            async with self._environment.serving():
                ready.set_result(None)
                await closing.wait()
        except Exception as error:  # of the environment's own servers
            log.exception("an environment of verifiers failed outside of its rollouts")
            if not ready.done():
                ready.set_exception(EpisodeError(f"{type(error).__name__}: {error}"))
