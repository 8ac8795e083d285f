"""What all processes of a run must agree on: kept in the run's `meta`, so that the server, not a config
file that may have been edited since, is what a worker, a janitor or the command goes by."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from pydantic import BaseModel, ConfigDict

SCHEMA = "1"
"""Version of keys and scripts; a client refuses a run of another one."""

LOADING = "loading"
"""Stands in place of the schema while a run is filled from a snapshot: nobody can open it."""


class TaskLimits(BaseModel):
    """One task as the queue sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = 1.0
    eval_of: str | None = None

    @property
    def lane(self) -> str:
        """The lane of new jobs of this task."""
        return "fresh" if self.eval_of is None else "eval"


class RunLimits(BaseModel):
    """Times in milliseconds, ages in train steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_ms: int = 10_000
    heartbeat_ms: int = 2_000
    worker_timeout_ms: int = 30_000
    role_timeout_ms: int = 15_000
    max_tries: int = 3
    pause_timeout_s: float = 300.0
    stale_threshold: int = 1
    tail_batch_trigger_size: int = -1
    order: str = "staleness"
    """in which ready groups are taken: see buffer/order.py"""
    retain_batches: int = 0
    """archived batches whose payloads and manifests are kept"""
    retain_until_exported: bool = False
    """and none is freed before somebody said that it was exported"""
    tasks: dict[str, TaskLimits] = {}

    @property
    def training_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is None]

    @property
    def eval_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is not None]

    def to_meta(self) -> list[str]:
        """Field and value pairs for the meta hash, readable with redis-cli."""
        pairs: list[str] = []
        for name, value in self.model_dump().items():
            pairs += [name, orjson.dumps(value).decode()]
        return pairs

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> RunLimits:
        return cls(**{name: orjson.loads(meta[name]) for name in cls.model_fields if name in meta})
