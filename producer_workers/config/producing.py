"""The processes that make rollouts, [worker], [producer] and [judges], and what they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from buffer.config.run_settings import (
    PlanSection,
    PolicySection,
    RedisSection,
    RunSection,
    WeightsSection,
)
from buffer.config.section import YEAR_S, Count, Section
from buffer.limits import Concurrency
from producer_workers.config.engine import EngineConfig
from producer_workers.config.strategy import StrategySection
from producer_workers.config.task import TaskSection


class WorkerSection(Section):
    """[worker]: one rollout worker."""

    concurrency: Concurrency = 8
    """groups that are sampled at once, in addition to those that only wait for their judge; more
    would wait in the engine's own queue, where no other worker can take them. auto: as many as keep
    the engine full, controlled by its queue and its KV cache
    """
    agent_loop: str = "single_turn"
    """how a group is generated: single_turn, multi_turn, tools, the name of a loop that a package
    attaches, or a class of yours as package.module:Class
    """
    tasks: list[str] | None = None
    """the tasks that this worker serves; default: all tasks"""
    lanes: list[Literal["eval", "resume", "fresh"]] = Field(
        default=["eval", "resume", "fresh"], min_length=1
    )
    """the lanes that this worker serves: eval (evaluations), resume (groups that were interrupted),
    fresh (new prompts)
    """
    drain_timeout_s: float = Field(60.0, ge=0, le=YEAR_S)
    """time in which a worker that is stopped finishes its groups before it returns the rest"""
    sleep_when_paused: bool = False
    """the engine frees its device memory while the run is paused by abort or drain, for a trainer
    on the same GPU
    """
    start_timeout_s: float = Field(600.0, gt=0, le=YEAR_S)
    """time in which the engine must have loaded its model"""


class ProducerSection(Section):
    """[producer]: which prompts become jobs, and how many at once."""

    max_prompt_tokens: Count | None = Field(None, ge=1)
    """longer prompts are skipped and counted; default: those with more than 2 MiB of text"""
    slice_size: int = Field(64, ge=1, le=128)
    """largest number of groups that one script enqueues"""


class JudgesSection(Section):
    """[judges]: the rq queue of tasks with judging of kind rq."""

    redis_url: str | None = Field(None, repr=False)
    """URL of one Redis or Valkey server for that queue; not a cluster, which rq cannot use;
    default: the server of the run
    """


class ProducingConfig(Protocol):
    """The sections that a worker or the producer reads, and what others say about its tasks."""

    @property
    def run(self) -> RunSection: ...
    @property
    def redis(self) -> RedisSection: ...
    @property
    def policy(self) -> PolicySection: ...
    @property
    def weights(self) -> WeightsSection: ...
    @property
    def plan(self) -> PlanSection: ...
    @property
    def tasks(self) -> Mapping[str, TaskSection]: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def worker(self) -> WorkerSection: ...
    @property
    def producer(self) -> ProducerSection: ...
    @property
    def judges(self) -> JudgesSection: ...
    @property
    def attached(self) -> Mapping[str, Any]: ...
    @property
    def model_folder(self) -> Path: ...
    @property
    def untruncated_tasks(self) -> list[str]:
        """Return the tasks whose tokens must be sampled from the model's whole distribution."""
        ...

    def strategy_of(self, task: str) -> StrategySection:
        """Return [strategy] with the values that a task sets itself."""
        ...

    def context_problem(self, max_model_len: int | None, tasks: Iterable[str]) -> str:
        """Return which of `tasks` may ask for more tokens than the engine's context."""
        ...
