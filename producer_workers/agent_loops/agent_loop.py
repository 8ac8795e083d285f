"""Define what a worker does with one group between claim and submit."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Protocol, cast

from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from buffer.rollouts.rollout import RolloutState
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import AnyJudge


class AgentLoop(Protocol):
    """Generates and judges groups. One instance of a task serves many groups at once.

    Usage:
        class MyLoop:
            def __init__(self, *, judge, tokenizer, eos_ids, partial_rollout):
                ...

            async def generate_group(self, states, engine, gid):
                ...
                return states
    """

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """Return the same rollouts, in order, each COMPLETED, ABORTED or FAILED.

        One rollout may become several with its index. A COMPLETED one is left as it is. One that is
        sampled and will be judged has its `finish_reason` ("stop", "length") at once: from then on
        its slot in the engine is free for the next group. Errors of the engine are passed on: the
        worker decides whether the group or the worker failed. Cancelling it cancels what runs in
        the engine. The prompt stays as it is, unless the class has `makes_prompts = True`: then a
        group may return with another one, the same for all of its rollouts.
        """
        ...


class AgentLoopFactory(Protocol):
    """Makes an agent loop; this is what "module:Class" in a configuration names.

    The task's `agent_loop_options` are added as keyword arguments.
    """

    def __call__(
        self,
        *,
        judge: AnyJudge | None,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        partial_rollout: bool,
    ) -> AgentLoop: ...


BUILT_IN = {
    "single_turn": "producer_workers.agent_loops.single_turn:SingleTurnAgentLoop",
    "multi_turn": "producer_workers.agent_loops.multi_turn:MultiTurnAgentLoop",
    "tools": "producer_workers.agent_loops.multi_turn:ToolAgentLoop",
    "gateway": "producer_workers.gateway.loop:GatewayAgentLoop",
}

_METHOD = "async def generate_group(self, states, engine, gid), which returns the states"


def load_agent_loop(
    spec: str | AgentLoopFactory,
    *,
    judge: AnyJudge | None,
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    partial_rollout: bool = False,
    options: Mapping[str, Any] | None = None,
) -> AgentLoop:
    """Make an agent loop from a name of BUILT_IN, a class, or "module:Class".

    Raises ConfigError.
    """
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", "agent loop")
    factory: Any = spec
    if isinstance(spec, str):
        factory = load_object(BUILT_IN.get(spec, spec), kind="agent loop", built_in=BUILT_IN)
    if not callable(factory):
        raise ConfigError(f"agent loop {name!r} is not a class", hint='give "module:Class"')
    try:
        chosen = cast(AgentLoopFactory, partial(factory, **(options or {})))
        loop = chosen(
            judge=judge, tokenizer=tokenizer, eos_ids=eos_ids, partial_rollout=partial_rollout
        )
    except TypeError as error:
        hint = (
            "its keyword arguments are judge, tokenizer, eos_ids, partial_rollout "
            "and the task's agent_loop_options"
        )
        raise ConfigError(f"agent loop {name!r}: {error}", hint=hint) from error
    if not inspect.iscoroutinefunction(getattr(loop, "generate_group", None)):
        raise ConfigError(f"agent loop {name!r} has no generate_group", hint=_METHOD)
    return loop
