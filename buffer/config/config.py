"""A whole config file: the sections both sides share, and room for those of one side.

Each side declares its own sections in a subclass (`buffer.config.worker`, `buffer.config.trainer`);
what belongs to the other side stays opaque to it. `rolloutmq run` and `rolloutmq check` read the
file as both, so every key is checked.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from pydantic import Field, field_validator, model_validator

from buffer.config.loader import Section
from buffer.config.memory import (
    MemoryNeed,
    MemorySection,
    RetentionSection,
    estimate_group_bytes,
)
from buffer.config.run import LeaseSection, PolicySection, RedisSection, RunSection, Tasks
from buffer.config.strategy import StrategySection
from buffer.model.dotted_path import is_dotted_path
from buffer.model.limits import RunLimits, TaskLimits


class PlanSection(Section):
    """[plan]: what both sides plan by."""

    steps: int = Field(100, ge=1)
    """train steps in all"""
    batch_size: int = Field(16, ge=1, le=1024)
    """groups per train step, over all training tasks"""
    curriculum: str | None = None
    """your function as package.module:function of what was counted so far, asked for task weights
    after each train step; default: the weights stay as the tasks say
    """

    @field_validator("curriculum")
    @classmethod
    def _check_curriculum(cls, name: str | None) -> str | None:
        if name is not None and not is_dotted_path(name):
            raise ValueError("expected package.module:function")
        return name


class LaunchSection(Section):
    """[launch]: what `rolloutmq run` starts on this machine."""

    workers: int = Field(2, ge=1)
    """rollout workers, one process each"""
    colocated: bool = False
    """trainer and workers share the same GPUs (they must fit side by side); otherwise an overlap is
    an error
    """
    trainer_gpus: list[int] | None = None
    """GPUs of the trainer; default: the first one where there are any"""
    worker_gpus: list[int] | None = None
    """GPUs of the workers, dealt out in groups of as many as the engine has shards; default: all
    others
    """
    judge_workers: int = Field(1, ge=1)
    """processes that judge, where a task has judging of kind rq"""
    max_restarts: int = Field(20, ge=0)
    """how often a process that died is started again before the run gives up"""


class ConfigFile(Section):
    """Every section of a config file."""

    run: RunSection
    redis: RedisSection = RedisSection()
    lease: LeaseSection = LeaseSection()
    policy: PolicySection = PolicySection()
    retention: RetentionSection = RetentionSection()
    memory: MemorySection = MemorySection()
    plan: PlanSection = PlanSection()
    strategy: StrategySection = StrategySection()
    launch: LaunchSection = LaunchSection()
    tasks: Tasks
    # of one side: opaque here, declared by that side's subclass
    engine: Any = Field(default_factory=dict)
    worker: Any = Field(default_factory=dict)
    producer: Any = Field(default_factory=dict)
    judges: Any = Field(default_factory=dict)
    trainer: Any = Field(default_factory=dict)
    learner: Any = Field(default_factory=dict)
    critic: Any = Field(default_factory=dict)
    tiny_model: Any = Field(default_factory=dict)
    warm_start: Any = Field(default_factory=dict)
    evaluation: Any = Field(default_factory=dict)

    @model_validator(mode="after")
    def _some_task_trains(self) -> ConfigFile:
        weights = [task.weight for task in self.tasks.values() if task.eval_of is None]
        if not weights or sum(weights) <= 0:
            raise ValueError("no training task has a weight above 0: there is nothing to train on")
        return self

    @model_validator(mode="after")
    def _images_have_a_folder(self) -> ConfigFile:
        named = [name for name, task in self.tasks.items() if getattr(task.dataset, "images", None)]
        if named and self.run.media is None:
            raise ValueError(f"the images of task {named[0]} need a folder: set media in [run]")
        return self

    @model_validator(mode="after")
    def _memory_is_enough(self) -> ConfigFile:
        if self.memory.budget_bytes and (problem := self.memory_problem(self.memory.budget_bytes)):
            raise ValueError(problem)
        return self

    def memory_problem(self, budget: int) -> str:
        """Why a run may not be held to so many bytes (0: any number); '' where it may (I12)."""
        return self._memory_need().problem(self.memory, budget)

    def _memory_need(self) -> MemoryNeed:
        section = self.producer
        prompt_tokens = (
            section.get("max_prompt_tokens")
            if isinstance(section, dict)
            else section.max_prompt_tokens
        )
        groups = [
            estimate_group_bytes(task.prompt_repeat_k, task.sample.max_tokens, prompt_tokens)
            for task in self.tasks.values()
            if task.eval_of is None
        ]
        ahead = self.policy.stale_threshold + self.strategy.over_sample_threshold
        return MemoryNeed(
            group_bytes=self.memory.group_bytes or max(groups),
            batches=self.batches_until_freed() + self.retention.batches,
            batch_size=self.plan.batch_size,
            in_flight=ceil(ahead * self.plan.batch_size),
        )

    def batches_until_freed(self) -> int:
        """Batches that were taken and that no checkpoint frees yet, at most. The training side
        knows.
        """
        return 1

    def strategy_of(self, task: str) -> StrategySection:
        """[strategy] with what the task says for itself. An evaluation task has that of the task it
        belongs to.
        """
        return self.strategy.overridden(self.tasks[task].strategy)

    def limits(self, maxmemory_bytes: int = 0) -> RunLimits:
        """What goes into the run's meta, for all processes to agree on. `maxmemory_bytes`: of the
        server, 0 = none.
        """
        budget = self.memory.budget(maxmemory_bytes)
        return RunLimits(
            lease_ms=self.lease.lease_ms,
            heartbeat_ms=self.lease.heartbeat_ms,
            worker_timeout_ms=self.lease.worker_timeout_ms,
            role_timeout_ms=self.lease.lease_ms,
            max_tries=self.lease.max_tries,
            pause_timeout_s=self.lease.pause_timeout_s,
            stale_threshold=self.policy.stale_threshold,
            token_threshold=self.policy.token_threshold,
            sync_weights_interval=self.policy.sync_weights_interval,
            steps=self.plan.steps,
            batch_size=self.plan.batch_size,
            over_sample_threshold=self.strategy.over_sample_threshold,
            max_consecutive_failures=self.strategy.max_consecutive_failures,
            tail_batch_trigger_size=self.strategy.tail_batch_trigger_size,
            tail_batch_max_tries=self.strategy.tail_batch_max_tries,
            order=self.policy.order,
            retain_batches=self.retention.batches,
            retain_until_exported=self.retention.policy == "export",
            media=str(self.run.media.resolve()) if self.run.media else "",
            wait_replicas=self.redis.wait_replicas,
            compression=self.memory.compression,
            low_bytes=int(budget * self.memory.low_water),
            high_bytes=int(budget * self.memory.high_water),
            tasks={name: self._task_limits(name) for name in self.tasks},
        )

    def _task_limits(self, name: str) -> TaskLimits:
        task = self.tasks[name]
        own = self.strategy_of(name)
        return TaskLimits(
            weight=task.weight,
            eval_of=task.eval_of,
            strategy=own.kind,
            # what is only common stays common, so that it can be changed for all at once
            tail_batch_trigger_size=None if task.strategy is None else own.tail_batch_trigger_size,
            tail_batch_max_tries=None if task.strategy is None else own.tail_batch_max_tries,
            over_sample_threshold=None if task.strategy is None else own.over_sample_threshold,
            max_in_flight=own.max_in_flight,
            max_consecutive_failures=None
            if task.strategy is None
            else own.max_consecutive_failures,
        )
