"""The limits of a run that all its processes must agree on.

They are in the run's `meta`: processes follow the server, not a config that was edited since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core.core_schema import no_info_after_validator_function

from buffer.task_mix import Reweighting, TaskMix
from buffer.wire.framing import Compression

SCHEMA = "3"
"""Version of keys, scripts and payloads; a client refuses a run of another one."""

LOADING = "loading"
"""Schema version of a run that is loaded from a snapshot: it cannot be opened."""

REMOVING = "removing"
"""Schema version of a run that is being removed: it cannot be opened."""

REGENERATING = "regenerating"
"""Schema version of a run that is cleared, to be made again from a checkpoint."""


Order = Literal["staleness", "fifo"]
"""Which completed groups are taken first: those of the oldest weights, or the first arrivals."""

DAY_MS = 86_400_000  # the longest time in milliseconds that the scripts accept

Bytes = Annotated[
    int,
    # a plain int, because a Redis client sends no ByteSize
    GetPydanticSchema(
        lambda _, schema_of: no_info_after_validator_function(int, schema_of(ByteSize))
    ),
]
"""A field that is read from a number, or from text like "8GiB" or "500MB"."""

Steps = Annotated[int, Field(ge=1, le=2**53 - 1)]  # exact in a script

Concurrency = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]
"""Groups that a worker runs at once; "auto": as many as keep its engine full."""

Straggler = Literal["drop", "retry", "wait"]
"""What happens to a group that is still being generated when its last train step is taken."""


class TaskSettings(BaseModel):
    """The settings of a task that `rolloutmq set` can change while the run continues.

    [strategy] and [tasks.<name>.strategy] of a config, the limits of the run and of each task, and
    `rolloutmq set` inherit this one declaration.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    over_sample_threshold: float = Field(0.0, ge=0, le=10_000, allow_inf_nan=False)
    """groups started beyond the batch, as a share of it: 0.5 starts half a batch more"""
    on_straggler: Straggler = "wait"
    """what happens to a group that is not finished when its last train step is taken. wait: the
    trainer waits for it, so that long responses are trained, too. drop: it ends. retry: its
    rollouts that are too old are generated again. drop and retry favour short responses
    """
    tail_batch_trigger_size: int = Field(0, ge=0, le=1_000_000)
    """for on_straggler = "retry". 0: groups that became too old are retried at once. N: once N of
    them wait, they are retried first, and nothing beyond the batch is started until it is made
    """
    tail_batch_max_tries: int | None = Field(None, ge=1, le=1_000_000)
    """interruptions after which a group without tokens waits with the expired groups, and is
    finished once it runs again: a pause of kind abort waits for it, at most half of [lease]
    pause_timeout_s; default: no limit, an interrupted group is started again each time
    """
    max_in_flight: int | None = Field(None, ge=1, le=1_000_000)
    """largest number of groups that wait or run; default: as many as the strategy needs"""
    max_consecutive_failures: int | None = Field(None, ge=0, le=100_000)
    """consecutive failed tries after which the task is stopped, with its reason, until `rolloutmq
    resume --task TASK`. The failures of one worker alone count for its share of the live workers.
    0: no limit; default: three times the groups of the task in a batch, and once while no try has
    succeeded, but at least 8
    """
    max_consecutive_filtered: int | None = Field(None, ge=1, le=1_000_000)
    """consecutive groups that is_valid_sample_fn filtered after which the task is stopped in the
    same way; default: no limit, since a hard task may filter for long
    """
    max_skipped_share: float = Field(0.5, ge=0, le=1, allow_inf_nan=False)
    """share of the newest 64 groups of the task that may be skipped (`rolloutmq.Skip`); beyond it,
    the task is stopped in the same way. 1: no limit
    """


class LiveLimits(TaskSettings):
    """The values of a run that `rolloutmq set` can change as they are."""

    max_tries: int = Field(3, ge=1, le=1_000_000)
    """failed or lost tries after which a group becomes a dead letter; new tokens or turns that were
    stored begin the count anew
    """
    pause_timeout_s: float = Field(300.0, gt=0, le=31_536_000, allow_inf_nan=False)
    """a worker that does not confirm a pause within this time is fenced"""
    concurrency: Concurrency | None = None
    """groups that each worker runs at once, or auto: as many as keep its engine full; default: as
    the worker's config says
    """
    low_bytes: Annotated[Bytes, Field(ge=0, le=1 << 50)] = 0
    """payload bytes above which no new prompt is started, as a number or text like 8GiB; 0: no
    limit
    """
    high_bytes: Annotated[Bytes, Field(ge=0, le=1 << 50)] = 0
    """payload bytes above which nothing is started; results are always accepted; 0: no limit"""
    steps: int = Field(100, ge=1, le=1_000_000_000)
    """train steps in all"""


class TaskLimits(TaskSettings):
    """One task as the queue sees it; `RunLimits.setting` adds what it does not set itself."""

    is_gone: bool = False
    """the config no longer names the task: no new group starts, and its groups are kept"""
    weight: float = Field(1.0, ge=0, le=1e6, allow_inf_nan=False)
    stale_threshold: Steps | None = None
    """None: that of the run"""
    ahead_threshold: Steps | None = None
    """None: that of the run"""
    eval_of: str | None = None
    strategy: Literal["async", "sync"] = "async"

    @property
    def lane(self) -> str:
        """Return the lane of new jobs of this task."""
        return "fresh" if self.eval_of is None else "eval"

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out defaults, which would hide later changes of the run's value."""
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if name in self.model_fields_set}


class RunLimits(LiveLimits):
    """The limits of a run: times in milliseconds, ages in train steps.

    All parts of a `Run` share one object; `adopt` changes it in place to newer values.
    """

    lease_ms: int = Field(10_000, ge=1, le=DAY_MS)
    heartbeat_ms: int = Field(2_000, ge=1, le=DAY_MS)
    worker_timeout_ms: int = Field(30_000, ge=0, le=DAY_MS)
    role_timeout_ms: int = Field(15_000, ge=0, le=DAY_MS)
    stale_threshold: Steps = 1
    """staleness from which groups are expired, of tasks that set none of their own"""
    ahead_threshold: Steps | None = None
    """staleness of weights from which they start no group for a step; None: `stale_threshold`"""
    token_threshold: Steps | None = None
    """staleness from which a single token is not trained, at most `stale_threshold`; None: no limit
    """
    sync_weights_interval: Steps = 1
    batch_size: int = Field(16, ge=1, le=1024)
    """groups of a train step, over all training tasks"""
    reweighted: list[Reweighting] = []
    """changes of task weights since the run was created"""
    order: Order = "staleness"
    retain_batches: int = Field(0, ge=0, le=1_000_000)
    """archived batches whose payloads and manifests are kept"""
    retain_until_exported: bool = False
    """no archived batch is freed before an exporter has confirmed its copy"""
    archive: str = ""
    """where the trainer copies archived batches: an absolute path or a URL; "" = nowhere"""
    columns: str = ""
    """absolute path of the folder for files of large columns (buffer/maintenance/column_files.py);
    "" = none
    """
    wait_replicas: int = Field(0, ge=0, le=64)
    """replicas that must have a submit, take or commit before it is acknowledged"""
    compression: Compression = "none"
    """compression of new payloads; all kinds can be read (buffer/wire/framing.py)"""
    tasks: dict[str, TaskLimits] = {}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        least = min([self.stale_threshold, *map(self._threshold, self.training_tasks)])
        if self.token_threshold is not None and self.token_threshold > least:
            raise ValueError(
                f"token_threshold = {self.token_threshold} must not exceed "
                f"stale_threshold = {least}"
            )
        if 0 < self.high_bytes < self.low_bytes:
            raise ValueError(
                f"low_bytes = {self.low_bytes} must not exceed high_bytes = {self.high_bytes}"
            )
        for name, task in self.tasks.items():
            if task.eval_of is not None and task.eval_of not in self.training_tasks:
                raise ValueError(
                    f"eval_of = {task.eval_of!r} of task {name} is not a training task"
                )
        return self

    def setting(self, task: str, name: str) -> Any:
        """Return a setting of a task (of `TaskSettings`): its own, or else the run's."""
        own = self.tasks[task]
        return getattr(own if name in own.model_fields_set else self, name)

    def retries_expired(self, task: str) -> bool:
        """Return whether expired groups of a task are tried again rather than dropped."""
        # sync never reissues them
        is_async = self.tasks[task].strategy == "async"
        return is_async and bool(self.setting(task, "on_straggler") == "retry")

    def waits_for_stragglers(self, task: str) -> bool:
        """Return whether a take waits for groups that it would be the last to use."""
        is_training = self.tasks[task].eval_of is None
        return is_training and bool(self.setting(task, "on_straggler") == "wait")

    def mix(self) -> TaskMix:
        if self.reweighted and self.reweighted[0].before:
            return TaskMix(self.batch_size, self.reweighted)
        first = Reweighting(
            from_step=1, weights={name: self.tasks[name].weight for name in self.training_tasks}
        )
        return TaskMix(self.batch_size, [first, *self.reweighted])

    def keeping_tasks_of(self, before: RunLimits) -> RunLimits:
        """Add the tasks that only `before` has, so that their groups are kept."""
        gone = {
            name: task.model_copy(update={"is_gone": True, "weight": 0.0})
            for name, task in before.tasks.items()
            if name not in self.tasks
        }
        return self.model_copy(deep=True, update={"tasks": {**self.tasks, **gone}})

    def newest_weights(self) -> dict[str, float]:
        """Return the weights of the training tasks as they were set last, used by a step or not."""
        last = self.reweighted[-1].weights if self.reweighted else {}
        return {name: last.get(name, self.tasks[name].weight) for name in self.training_tasks}

    def tail_tries(self, task: str) -> int | None:
        """Return the interruptions after which a pause waits for a group; None: evaluation."""
        is_eval = self.tasks[task].eval_of is not None
        return None if is_eval else self.setting(task, "tail_batch_max_tries")

    def failures_in_row(self, task: str) -> tuple[int | None, int | None]:
        """Return the failures in a row that stop a task, and those while none succeeded (I11).

        None: no limit.
        """
        most = self.setting(task, "max_consecutive_failures")
        if most is not None:
            return most or None, most or None
        is_eval = self.tasks[task].eval_of is not None
        weights = self.newest_weights()
        share = 1.0 if is_eval else weights[task] / sum(weights.values())
        # one bad row must not end a batch of one group
        batch = max(8, ceil(self.batch_size * share))
        return 3 * batch, batch

    def most_skipped(self, task: str) -> int:
        """Return how many of the newest 64 groups of a task may be skipped."""
        return int(64 * self.setting(task, "max_skipped_share"))

    def adopt(self, newer: RunLimits) -> None:
        """Take over the values of `newer` in place."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(newer, name))

    def threshold(self, task: str) -> int | None:
        """Return the staleness from which groups of a task expire; None: never."""
        return self._threshold(task) if self.tasks[task].eval_of is None else None

    def _threshold(self, task: str) -> int:
        own = self.tasks[task].stale_threshold
        return self.stale_threshold if own is None else own

    def horizon(self, task: str) -> int:
        """Return for how many train steps of a task one version of the weights starts groups."""
        return self._ahead(task)[0]

    def _ahead(self, task: str) -> tuple[int, str]:
        own = self.tasks[task].ahead_threshold
        ahead = self.ahead_threshold if own is None else own
        # a group of one version expires with its tokens
        tokens, groups = self.token_threshold, self._threshold(task)
        most = (tokens, "max_token_staleness") if tokens else (groups, "max_staleness")
        return most if ahead is None or ahead > most[0] else (ahead, "max_ahead")

    def horizon_of(self, step: int) -> int:
        """Return the least `horizon` of the tasks in the batch of `step`."""
        return self.limit_of(step)[0]

    def limit_of(self, step: int) -> tuple[int, str]:
        """Return `horizon_of` a step, and the setting that limits it."""
        return min(self._ahead(task) for task, share in self.mix().shares(step).items() if share)

    def largest_horizon(self) -> int:
        return max(self.horizon(task) for task in self.training_tasks)

    def token_lead(self, task: str) -> int | None:
        """Return how many steps earlier than its group a token expires; None: not earlier."""
        if self.token_threshold is None or self.tasks[task].eval_of is not None:
            return None
        return self._threshold(task) - self.token_threshold

    @property
    def training_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is None]

    @property
    def eval_tasks(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.eval_of is not None]

    def to_meta(self, names: Collection[str] | None = None) -> list[str]:
        """Return field, value, field, value, … for the meta hash; `names`: the fields or all."""
        pairs: list[str] = []
        for name, value in self.model_dump(include=None if names is None else set(names)).items():
            pairs += [name, orjson.dumps(value).decode()]
        return pairs

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> RunLimits:
        return cls(**{name: orjson.loads(meta[name]) for name in cls.model_fields if name in meta})
