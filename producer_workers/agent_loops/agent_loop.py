"""What a worker does with one group between claim and submit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from buffer.errors import ConfigError
from buffer.imports import attached, load_object
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import Judge


class AgentLoop(Protocol):
    """Generates and judges groups. One instance of a task serves many groups at once.

    It may have coroutines `open()` and `close()`, which a worker calls when it starts and leaves.
    A class may have a static method `open_gateway(config, run, tasks, facts)`: the loops of a
    worker that have the same one share what it returns, and get it as `gateway`.
    """

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """Return the same rollouts, in order, each COMPLETED, ABORTED or FAILED.

        One rollout may become several with its index. Leave COMPLETED ones as they are. Set
        `finish_reason` ("stop", "length") as soon as a rollout is sampled: its slot in the engine
        is then free for the next group. Raise the engine's errors; cancel its requests when
        cancelled. Keep the prompt, unless the class has `makes_prompts = True`: then the group may
        return with another one.
        """
        ...


# A class with the keyword arguments judge, tokenizer, eos_ids, partial_rollout, and those of the
# task's `agent_loop_options`.
AgentLoopFactory = Callable[..., AgentLoop]

BUILT_IN = {
    "single_turn": "producer_workers.agent_loops.single_turn:SingleTurnAgentLoop",
    "multi_turn": "producer_workers.agent_loops.multi_turn:MultiTurnAgentLoop",
    "tools": "producer_workers.agent_loops.multi_turn:ToolAgentLoop",
}

LOOPS = "rolloutmq.agent_loops"
"""The group of entry points whose classes are loops, by the name that a config gives."""

AGENTS = "rolloutmq.agents"
"""The same, for loops of agents, which ask over HTTP with prompts of their own."""


def named_loops() -> dict[str, str]:
    """Return the loops that have a name, as package.module:Class. Raises ConfigError."""
    return {**attached(LOOPS), **attached(AGENTS), **BUILT_IN}


def has_agents(loop: str) -> bool:
    """Return whether a loop with a name runs agents."""
    return loop in attached(AGENTS)


def load_agent_loop(
    spec: str | AgentLoopFactory,
    *,
    judge: Judge | None,
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    partial_rollout: bool = False,
    options: Mapping[str, Any] | None = None,
    gateway: Callable[[Callable[..., Any]], Any] | None = None,
) -> AgentLoop:
    """Make a loop from one of `named_loops`, a class, or "module:Class". Raises ConfigError.

    `gateway` returns what `open_gateway` opens; default: a loop that uses a gateway has its own.
    """
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", "agent loop")
    factory: Any = spec
    if isinstance(spec, str):
        known = named_loops()
        factory = load_object(known.get(spec, spec), kind="agent loop", built_in=known)
    if not callable(factory):
        raise ConfigError(f"agent loop {name!r} is not a class", hint='give "module:Class"')
    given: dict[str, Any] = {
        "judge": judge,
        "tokenizer": tokenizer,
        "eos_ids": eos_ids,
        "partial_rollout": partial_rollout,
    }
    if gateway and hasattr(factory, "open_gateway"):
        given["gateway"] = gateway(factory.open_gateway)
    try:
        loop: AgentLoop = factory(**{**(options or {}), **given})
    except TypeError as error:
        hint = f"its keyword arguments are {', '.join(given)} and the task's agent_loop_options"
        raise ConfigError(f"agent loop {name!r}: {error}", hint=hint) from error
    if not inspect.iscoroutinefunction(getattr(loop, "generate_group", None)):
        hint = "async def generate_group(self, states, engine, gid), which returns the states"
        raise ConfigError(f"agent loop {name!r} has no generate_group", hint=hint)
    return loop
