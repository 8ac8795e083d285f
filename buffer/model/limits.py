"""What all processes of a run must agree on: kept in the run's `meta`, so that the server, not a
config file that may have been edited since, is what a worker, a janitor or the command goes by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict

from buffer.model.compression import Compression
from buffer.model.task_mix import Reweighting, TaskMix

SCHEMA = "1"
"""Version of keys and scripts; a client refuses a run of another one."""

LOADING = "loading"
REMOVING = "removing"
"""Stands in place of the schema while a run is filled from a snapshot: nobody can open it."""


Concurrency = int | Literal["auto"]
"""Groups that a worker has in work at once; "auto": as many as keep its engine full."""


class TaskLimits(BaseModel):
    """One task as the queue sees it."""

    model_config = ConfigDict(extra="forbid")

    weight: float = 1.0
    eval_of: str | None = None
    tail_batch_trigger_size: int | None = None
    """the task's own; None: the run's"""
    tail_batch_max_tries: int | None = None
    """the task's own; None: the run's"""
    over_sample_threshold: float | None = None
    """the task's own; None: the run's"""
    strategy: Literal["async", "sync"] = "async"
    max_in_flight: int | None = None
    """groups that wait or run at most; None: as many as the target asks for"""
    max_consecutive_failures: int | None = None
    """the task's own; None: the run's"""

    @property
    def lane(self) -> str:
        """The lane of new jobs of this task."""
        return "fresh" if self.eval_of is None else "eval"


class RunLimits(BaseModel):
    """Times in milliseconds, ages in train steps.

    One object for all parts of a `Run`: `adopt` changes it in place when the server has newer ones,
    so that no part can go on with old ones.
    """

    model_config = ConfigDict(extra="forbid")

    lease_ms: int = 10_000
    heartbeat_ms: int = 2_000
    worker_timeout_ms: int = 30_000
    role_timeout_ms: int = 15_000
    max_tries: int = 3
    pause_timeout_s: float = 300.0
    stale_threshold: int = 1
    token_threshold: int | None = None
    """staleness from which a single token is not trained, at most `stale_threshold`; None: all
    tokens of a group are
    """
    sync_weights_interval: int = 1
    steps: int = 100
    """train steps in all"""
    batch_size: int = 16
    """groups of a train step, over all training tasks"""
    over_sample_threshold: float = 0.0
    tail_batch_trigger_size: int = -1
    tail_batch_max_tries: int | None = None
    """interruptions after which a group counts as expired, and is finished once it runs again;
    None: never
    """
    max_consecutive_failures: int | None = None
    """tries that fail or are filtered one after the other before nothing more of a task is started;
    None: no bound
    """
    concurrency: Concurrency | None = None
    """groups in work at once in each worker; None: as its config says"""
    reweighted: list[Reweighting] = []
    """task weights that were changed while the run went on"""
    order: str = "staleness"
    """in which ready groups are taken: see buffer/model/order_policy.py"""
    retain_batches: int = 0
    """archived batches whose payloads and manifests are kept"""
    retain_until_exported: bool = False
    """and none is freed before somebody said that it was exported"""
    media: str = ""
    """folder of files that payloads refer to as run://…, an absolute path; "" = none
    (buffer/store/media_folder.py)
    """
    wait_replicas: int = 0
    """replicas that must have a submit, take or commit before it is answered"""
    low_bytes: int = 0
    """payload bytes from which no fresh prompt is started or claimed; 0 = no bound"""
    high_bytes: int = 0
    """and from which nothing is; results are always taken"""
    compression: Compression = "none"
    """of payloads that are written; any can be read (buffer/model/compression.py)"""
    tasks: dict[str, TaskLimits] = {}

    def retries_expired(self, task: str) -> bool:
        """Whether what expires is kept for another try; otherwise it is dropped."""
        return self.tail_batch(task) >= 0

    def mix(self) -> TaskMix:
        """How batches are shared among the training tasks."""
        if self.reweighted and self.reweighted[0].before:
            return TaskMix(self.batch_size, self.reweighted)
        first = Reweighting(
            from_step=1, weights={name: self.tasks[name].weight for name in self.training_tasks}
        )
        return TaskMix(self.batch_size, [first, *self.reweighted])

    def newest_weights(self) -> dict[str, float]:
        """Weights of the training tasks as they were set last, whether or not a step has used them."""
        last = self.reweighted[-1].weights if self.reweighted else {}
        return {name: last.get(name, self.tasks[name].weight) for name in self.training_tasks}

    def over_sampling(self, task: str) -> float:
        """Groups of a task that are started beyond the batch, as a share of it."""
        own = self.tasks[task].over_sample_threshold
        return self.over_sample_threshold if own is None else own

    def tail_batch(self, task: str) -> int:
        own = self.tasks[task].tail_batch_trigger_size
        return self.tail_batch_trigger_size if own is None else own

    def tail_tries(self, task: str) -> int | None:
        """Interruptions after which a pause waits for a group of a task; evaluations are asked
        again as a whole.
        """
        own = self.tasks[task]
        return (
            None
            if own.eval_of is not None
            else own.tail_batch_max_tries or self.tail_batch_max_tries
        )

    def patience(self, task: str) -> int | None:
        """Tries of a task that may fail, or be filtered, one after the other."""
        return self.tasks[task].max_consecutive_failures or self.max_consecutive_failures

    def is_too_many_failures(self, task: str, failures: int) -> bool:
        """Whether so many in a row stop the task (I11)."""
        patience = self.patience(task)
        return patience is not None and failures >= patience

    def adopt(self, newer: RunLimits) -> None:
        """Become `newer`, in place."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(newer, name))

    def threshold(self, task: str) -> int | str:
        """The first staleness at which groups of a task are too old; "" for an evaluation, whose
        groups do not age.
        """
        return self.stale_threshold if self.tasks[task].eval_of is None else ""

    @property
    def horizon(self) -> int:
        """How many train steps one version of the weights may serve: a group of one version is used
        up when its tokens are.
        """
        return self.token_threshold or self.stale_threshold

    @property
    def lag(self) -> int | str:
        """By how many steps single tokens expire earlier than groups; "" where they do not."""
        return "" if self.token_threshold is None else self.stale_threshold - self.token_threshold

    def token_lag(self, task: str) -> int | str:
        """The `lag` of a task; evaluations do not age."""
        return self.lag if self.tasks[task].eval_of is None else ""

    @property
    def training_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is None]

    @property
    def eval_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is not None]

    def to_meta(self, names: Collection[str] | None = None) -> list[str]:
        """Field and value pairs for the meta hash, readable with redis-cli; all of them by default."""
        pairs: list[str] = []
        for name, value in self.model_dump(include=None if names is None else set(names)).items():
            pairs += [name, orjson.dumps(value).decode()]
        return pairs

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> RunLimits:
        return cls(**{name: orjson.loads(meta[name]) for name in cls.model_fields if name in meta})
