"""What a worker does with one group between claim and submit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from buffer.errors import ConfigError
from buffer.groups.job_queue import Serves
from buffer.imports import attached, load_object
from buffer.job import Job
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.config.producing import ProducingConfig
from producer_workers.config.task import TaskSection
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import Judge


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Room for `limit` groups of the tasks in `serves`, beside those that are `sampled` now."""

    limit: int
    serves: Serves
    sampled: list[Job]


Generate = Callable[[list[RolloutState], Engine, str], Coroutine[Any, Any, list[RolloutState]]]


class AgentLoop:
    """Generates and judges groups. One instance of a task serves many groups at once.

    Of a class that does not inherit this one, `makes_prompts`, `open`, `close` and `interrupt` are
    used, too.
    """

    makes_prompts: bool = False
    """whether groups may return with another prompt than they were drawn with"""
    needs: ClassVar[Mapping[str, str]] = {}
    """the modules that it imports from packages of others, and what installs each"""
    command: ClassVar[str] = "worker"
    """the command whose processes serve its tasks"""
    claims_on_demand: bool = False
    """whether groups are claimed only when it calls `claim_soon`, within `limit_claim`"""
    claim_soon: Callable[[], None]
    """set by its worker"""

    facts: Mapping[str, str] = MappingProxyType({})
    """what its worker registers, once it is open"""

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """Return the same rollouts, in order, each COMPLETED, ABORTED or FAILED.

        One rollout may become several with its index. Leave COMPLETED ones as they are. Set
        `finish_reason` ("stop", "length") as soon as a rollout is sampled: its slot in the engine
        is then free for the next group. Raise the engine's errors; cancel its requests when
        cancelled. Keep the prompt, unless the class has `makes_prompts = True`.
        """
        raise NotImplementedError

    @classmethod
    def of_worker(
        cls, config: ProducingConfig, run: Run, tasks: Collection[str], **given: Any
    ) -> AgentLoop:
        """Return the loop of one of a worker's `tasks`; `given`: see `AgentLoopFactory`."""
        return cls(**given)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if a worker on this machine could not use `agent_loop_options`."""

    async def open(self) -> None:
        """Load or serve what it needs, before its worker joins the run. Raises ConfigError."""

    async def close(self) -> None:
        """End what `open` and groups have started, when its worker leaves."""

    def interrupt(self) -> None:
        """End what waits for something else than the engine: a pause begins, or the worker leaves.

        Called repeatedly.
        """

    def limit_claim(self, vacancy: Vacancy, held: int) -> Vacancy:
        """Return this vacancy or a smaller one, while `held` groups are held."""
        return vacancy

    def resume(self, group: RolloutGroup) -> RolloutGroup:
        """Return a claimed group with what was kept while another worker ran it. Raises WireError.

        Its turns are in `group.turns`.
        """
        return group

    def for_claim(self, run: Run, job: Job, group: RolloutGroup) -> Generate:
        """Return what generates a group that was claimed, called as `generate_group`."""
        return self.generate_group


class _AdoptedLoop(AgentLoop):
    """A loop of a class that does not inherit `AgentLoop`, with those of these members it has.

    One that is no coroutine function where it should be one, or the reverse, is its own matter.
    """

    ADOPTED = ("generate_group", "makes_prompts", "open", "close", "interrupt")

    def __init__(self, loop: Any) -> None:
        is_async = inspect.iscoroutinefunction
        for name in self.ADOPTED:
            own = getattr(loop, name, None)
            if own is not None and is_async(own) == is_async(getattr(self, name)):
                setattr(self, name, own)


# A class with the keyword arguments judge, tokenizer, eos_ids, partial_rollout, and those of the
# task's `agent_loop_options`.
AgentLoopFactory = Callable[..., Any]

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


def load_class(spec: str) -> type[AgentLoop]:
    """Return one of `named_loops`, or the class at "module:Class". Raises ConfigError."""
    known = named_loops()
    found: type[AgentLoop] = load_object(known.get(spec, spec), kind="agent loop", built_in=known)
    return found


def commands_of(tasks: Mapping[str, TaskSection], default_loop: str) -> dict[str, str]:
    """Return the command whose processes serve each task. Raises ConfigError.

    `default_loop`: [worker] agent_loop.
    """
    found = {}
    for name, task in tasks.items():
        loop = task.loop(default_loop)
        # a loop without a name may import what only workers have
        found[name] = load_class(loop).command if has_agents(loop) else AgentLoop.command
    return found


def load_agent_loop(
    spec: str | AgentLoopFactory,
    *,
    judge: Judge | None,
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    partial_rollout: bool = False,
    options: Mapping[str, Any] | None = None,
    worker: tuple[ProducingConfig, Run, Collection[str]] | None = None,
) -> AgentLoop:
    """Make a loop from one of `named_loops`, a class, or "module:Class". Raises ConfigError.

    `worker`: the config, run and tasks of the worker that it is for; default: it is for a test.
    """
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", "agent loop")
    factory: Any = load_class(spec) if isinstance(spec, str) else spec
    if not callable(factory):
        raise ConfigError(f"agent loop {name!r} is not a class", hint='give "module:Class"')
    given: dict[str, Any] = {
        "judge": judge,
        "tokenizer": tokenizer,
        "eos_ids": eos_ids,
        "partial_rollout": partial_rollout,
    }
    if worker and isinstance(factory, type) and issubclass(factory, AgentLoop):
        factory = partial(factory.of_worker, *worker)
    try:
        loop = factory(**{**(options or {}), **given})
    except TypeError as error:
        hint = f"its keyword arguments are {', '.join(given)} and the task's agent_loop_options"
        raise ConfigError(f"agent loop {name!r}: {error}", hint=hint) from error
    if not inspect.iscoroutinefunction(getattr(loop, "generate_group", None)):
        hint = "async def generate_group(self, states, engine, gid), which returns the states"
        raise ConfigError(f"agent loop {name!r} has no generate_group", hint=hint)
    return loop if isinstance(loop, AgentLoop) else _AdoptedLoop(loop)
