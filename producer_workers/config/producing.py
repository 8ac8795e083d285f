"""What workers and the producer read of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from buffer.config.run_settings import PlanSection, PolicySection, RedisSection, RunSection
from producer_workers.config.engine import EngineConfig
from producer_workers.config.gateway import GatewaySection
from producer_workers.config.strategy import StrategySection
from producer_workers.config.task import TaskSection
from producer_workers.config.teacher import TeacherSection
from producer_workers.config.worker import JudgesSection, ProducerSection, WorkerSection


class ProducingConfig(Protocol):
    """The sections that a worker or the producer reads, and what others say about its tasks."""

    @property
    def run(self) -> RunSection: ...
    @property
    def redis(self) -> RedisSection: ...
    @property
    def policy(self) -> PolicySection: ...
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
    def gateway(self) -> GatewaySection: ...
    @property
    def model_folder(self) -> Path: ...
    @property
    def teachers(self) -> Mapping[str, TeacherSection]: ...
    def teacher_engine(self, name: str) -> EngineConfig: ...
    def teacher_folder(self, name: str) -> Path: ...
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
