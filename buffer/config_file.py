"""A whole config file: the sections both sides share, and room for those of one side.

Each side declares its own sections in a subclass (`producer_workers.config`, `consumer.config`); what belongs to
the other side stays opaque to it. `rolloutmq run` and `rolloutmq check` read the file as both, so every key is checked.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from buffer.config import Section
from buffer.limits import RunLimits, TaskLimits
from buffer.retention_config import RetentionSection
from buffer.run_config import (
    LeaseSection,
    PolicySection,
    RedisSection,
    RunSection,
    StrategySection,
    Tasks,
)


class PlanSection(Section):
    """[plan]: what both sides plan by."""

    steps: int = Field(100, ge=1)
    """train steps in all"""
    batch_size: int = Field(16, ge=1, le=4096)
    """groups per train step, over all training tasks"""


class LaunchSection(Section):
    """[launch]: what `rolloutmq run` starts on this machine."""

    workers: int = Field(2, ge=1)
    """rollout workers, one process each"""
    colocated: bool = False
    """trainer and workers share the same GPUs (they must fit side by side); otherwise an overlap is an error"""
    trainer_gpus: list[int] | None = None
    """GPUs of the trainer; default: the first one where there are any"""
    worker_gpus: list[int] | None = None
    """GPUs of the workers, dealt out in groups of the engine's tensor_parallel_size; default: all others"""
    max_restarts: int = Field(20, ge=0)
    """how often a process that died is started again before the run gives up"""


class ConfigFile(Section):
    """Every section of a config file."""

    run: RunSection
    redis: RedisSection = RedisSection()
    lease: LeaseSection = LeaseSection()
    policy: PolicySection = PolicySection()
    retention: RetentionSection = RetentionSection()
    plan: PlanSection = PlanSection()
    strategy: StrategySection = StrategySection()
    launch: LaunchSection = LaunchSection()
    tasks: Tasks
    # of one side: opaque here, declared by that side's subclass
    engine: Any = Field(default_factory=dict)
    worker: Any = Field(default_factory=dict)
    producer: Any = Field(default_factory=dict)
    trainer: Any = Field(default_factory=dict)
    learner: Any = Field(default_factory=dict)
    tiny_model: Any = Field(default_factory=dict)
    warm_start: Any = Field(default_factory=dict)
    evaluation: Any = Field(default_factory=dict)

    @model_validator(mode="after")
    def _some_task_trains(self) -> ConfigFile:
        weights = [task.weight for task in self.tasks.values() if task.eval_of is None]
        if not weights or sum(weights) <= 0:
            raise ValueError("no training task has a weight above 0: there is nothing to train on")
        return self

    def limits(self) -> RunLimits:
        """What goes into the run's meta, for all processes to agree on."""
        return RunLimits(
            lease_ms=self.lease.lease_ms,
            heartbeat_ms=self.lease.heartbeat_ms,
            worker_timeout_ms=self.lease.worker_timeout_ms,
            role_timeout_ms=self.lease.lease_ms,
            max_tries=self.lease.max_tries,
            pause_timeout_s=self.lease.pause_timeout_s,
            stale_threshold=self.policy.stale_threshold,
            tail_batch_trigger_size=self.strategy.tail_batch_trigger_size,
            order=self.policy.order,
            retain_batches=self.retention.batches,
            retain_until_exported=self.retention.policy == "export",
            tasks={n: TaskLimits(weight=t.weight, eval_of=t.eval_of) for n, t in self.tasks.items()},
        )


def allocate(batch_size: int, weights: dict[str, float]) -> dict[str, int]:
    """Groups of each task in a batch: by weight, largest remainder first, ties by order (2:1:0 of 7 is 5, 2, 0)."""
    total = sum(weights.values())
    if batch_size < 0 or total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"cannot share {batch_size} groups by weights {weights}")
    exact = {task: batch_size * weight / total for task, weight in weights.items()}
    shares = {task: int(share) for task, share in exact.items()}
    by_remainder = sorted(exact, key=lambda task: shares[task] - exact[task])
    for task in by_remainder[: batch_size - sum(shares.values())]:
        shares[task] += 1
    return shares
