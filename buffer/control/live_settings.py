"""Settings that may change during a run: `rolloutmq set max_staleness=2 tasks.math.weight=3`.

A change is validated like a config file and stored under a new version of the run's limits by one
script. Every process adopts it with its next heartbeat, round or batch. It lasts until the run is
started again from its config file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from buffer.config.errors import FIXED
from buffer.config.loader import Section
from buffer.errors import ConfigError
from buffer.model.byte_size import ByteSize
from buffer.model.limits import RunLimits
from buffer.model.staleness import stale_threshold
from buffer.model.task_mix import Reweighting, newest_parts

_BY_WORKERS = (
    "each worker reads it at its start; change the config, then restart the workers one by one"
)
_FIXED: dict[str, Any] = {
    "group_time_limit_s": _BY_WORKERS,
    "enable_partial_rollout": _BY_WORKERS,
    "is_valid_sample_fn": _BY_WORKERS,
    "should_continue_fn": "the producer reads it at its start; change the config, then restart it",
    "sync_weights_interval": "ages are counted in it; start another run",
    "max_token_staleness": "the pools are ordered by it; start another run",
}


class LiveTaskSettings(Section):
    """Settings of one training task: `tasks.<name>`."""

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    weight: float | None = Field(None, ge=0, allow_inf_nan=False)
    """its share of a batch, from the first step for which nothing is started yet"""
    over_sample_threshold: float | None = Field(None, ge=0)
    """groups started beyond the batch, as a fraction of it"""
    tail_batch_trigger_size: int | None = Field(None, ge=-1)
    """expired groups: -1 drops them, 0 retries them at once, N retries them first once there are N"""
    tail_batch_max_tries: int | None = Field(None, ge=1)
    """interruptions after which a group is finished even if a pause waits for it"""
    max_in_flight: int | None = Field(None, ge=1)
    """most groups that wait or run at once"""
    max_consecutive_failures: int | None = Field(None, ge=1)
    """tries that fail or are filtered in a row before the task is stopped"""


class LiveSettings(Section):
    """Changes of a run's limits; None leaves a setting as it is."""

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    max_staleness: int | None = Field(None, ge=0)
    """most publications by which the weights of a rollout may be old"""
    over_sample_threshold: float | None = Field(None, ge=0)
    """groups started beyond the batch, as a fraction of it, for tasks without their own"""
    tail_batch_trigger_size: int | None = Field(None, ge=-1)
    """for tasks without their own"""
    tail_batch_max_tries: int | None = Field(None, ge=1)
    """for tasks without their own"""
    max_tries: int | None = Field(None, ge=1)
    """failed or lost tries after which a group is a dead letter"""
    pause_timeout_s: float | None = Field(None, gt=0)
    """seconds after which a worker that does not confirm a pause is fenced"""
    concurrency: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] | None = None
    """most groups that each worker runs at once, in place of its config; auto: as many as keep its
    engine full
    """
    low_bytes: ByteSize | None = None
    """payload bytes from which no new prompt is started: a number, or a text like 8GiB"""
    high_bytes: ByteSize | None = None
    """payload bytes from which nothing is started"""
    steps: int | None = Field(None, ge=1)
    """number of train steps"""
    tasks: dict[str, LiveTaskSettings] = Field(default_factory=dict)

    def applied(self, limits: RunLimits, taken: int) -> RunLimits:
        """Return a copy of `limits` with these changes; `taken` is the newest train step.

        Raises ConfigError for an unknown task and for values that exclude each other.
        """
        changed = limits.model_copy(deep=True)
        for name in set(LiveSettings.model_fields) - {"max_staleness", "tasks"}:
            value = getattr(self, name)
            if value is not None:
                setattr(changed, name, value)
        if self.max_staleness is not None:
            changed.stale_threshold = stale_threshold(
                self.max_staleness, limits.sync_weights_interval
            )
            if changed.lag != limits.lag:
                raise ConfigError(
                    "max_staleness cannot change in a run that has a max_token_staleness",
                    hint="its pools are ordered by the difference of the two; start another run",
                )
        if 0 < changed.high_bytes < changed.low_bytes:
            raise ConfigError(
                f"low_bytes would be {changed.low_bytes}, above high_bytes = {changed.high_bytes}",
                hint="set both, low_bytes below high_bytes",
            )
        for name, task in self.tasks.items():
            self._apply_to_task(changed, name, task)
        self._reweigh(changed, taken + 1 + max(limits.stale_threshold, changed.stale_threshold))
        return changed

    @staticmethod
    def _apply_to_task(limits: RunLimits, name: str, task: LiveTaskSettings) -> None:
        if name not in limits.training_tasks:
            raise ConfigError(
                f"there is no training task {name!r}",
                hint=f"one of {', '.join(limits.training_tasks)}",
            )
        for field in set(LiveTaskSettings.model_fields) - {"weight"}:
            value = getattr(task, field)
            if value is not None:
                setattr(limits.tasks[name], field, value)

    def _reweigh(self, limits: RunLimits, from_step: int) -> None:
        named = {name: task.weight for name, task in self.tasks.items()}
        weights = {name: weight for name, weight in named.items() if weight is not None}
        if not weights:
            return
        now = {**limits.newest_weights(), **weights}
        if sum(now.values()) <= 0:
            raise ConfigError("no training task would have a weight above 0")
        earlier = [part for part in limits.reweighted if part.from_step < from_step]
        limits.reweighted = [*earlier, Reweighting(from_step=from_step, weights=now)]
        limits.reweighted = newest_parts(limits.reweighted, limits.mix())


def differences(before: RunLimits, after: RunLimits) -> dict[str, tuple[Any, Any]]:
    """Return the limits that differ, by name: (before, after)."""
    old = before.model_dump()
    new = after.model_dump()
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}
