"""An agent loop: what a worker does with one group between claim and submit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, cast

from buffer.dotted_path import load_object
from buffer.errors import ConfigError
from buffer.rollout import RolloutState
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import Judge
from producer_workers.tokenizer import Tokenizer


class AgentLoop(Protocol):
    """Generates and judges groups. One instance of a task serves many groups at once."""

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """The same rollouts, in order, each COMPLETED, ABORTED or FAILED.

        A COMPLETED one is left as it is. What the engine raises is passed on: whether the group or the
        worker failed is for the worker to say. Cancelling it cancels what runs in the engine.
        """
        ...


class AgentLoopFactory(Protocol):
    """How an agent loop is made: what stands behind "module:Class" in a configuration."""

    def __call__(
        self, *, judge: Judge | None, tokenizer: Tokenizer, eos_ids: Collection[int], partial_rollout: bool
    ) -> AgentLoop: ...


def load_agent_loop(
    spec: str,
    *,
    judge: Judge | None,
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    partial_rollout: bool = False,
) -> AgentLoop:
    """The loop "single_turn", or what the class at "module:Class" makes of these. Raises ConfigError."""
    from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop

    built_in: dict[str, AgentLoopFactory] = {"single_turn": SingleTurnAgentLoop}
    factory = built_in.get(spec) or load_object(spec, kind="agent loop", built_in=built_in)
    if not callable(factory):
        raise ConfigError(f"agent loop {spec!r} is not a class", hint='give "module:Class"')
    factory = cast(AgentLoopFactory, factory)
    return factory(judge=judge, tokenizer=tokenizer, eos_ids=eos_ids, partial_rollout=partial_rollout)
