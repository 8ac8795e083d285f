"""What may be changed while a run goes on: `rolloutmq set max_staleness=2 tasks.math.weight=3`.

A change is checked like a config file, stored under a new version of the run's limits by one
script, and taken over by every process at its next heartbeat, round or batch. It lasts until the
run is started again from its file.
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

_BY_WORKERS = "each worker reads it when it starts; change the config, then start the workers again, one by one"
_FIXED: dict[str, Any] = {
    "group_time_limit_s": _BY_WORKERS,
    "enable_partial_rollout": _BY_WORKERS,
    "is_valid_sample_fn": _BY_WORKERS,
    "should_continue_fn": "the producer reads it when it starts; change the config, then start the producer again",
    "sync_weights_interval": "it is what ages are counted in; start another run",
    "max_token_staleness": "the pools are scored by it; start another run",
}


class LiveTaskSettings(Section):
    """tasks.<name>: of one training task."""

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    weight: float | None = Field(None, ge=0, allow_inf_nan=False)
    """its share of a batch, from the first step on for which nothing was started"""
    over_sample_threshold: float | None = Field(None, ge=0)
    """groups started beyond the batch, as a share of it"""
    tail_batch_trigger_size: int | None = Field(None, ge=-1)
    """expired groups: -1 drops them, 0 retries them at once, N retries them first once there are N"""
    tail_batch_max_tries: int | None = Field(None, ge=1)
    """interruptions after which a group is finished, whatever waits for it"""
    max_in_flight: int | None = Field(None, ge=1)
    """groups that wait or run at most"""
    max_consecutive_failures: int | None = Field(None, ge=1)
    """tries that fail or are filtered one after the other before the task is stopped"""


class LiveSettings(Section):
    """All of them; None is left as it is."""

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    max_staleness: int | None = Field(None, ge=0)
    """how many publications old the weights of a rollout may be"""
    over_sample_threshold: float | None = Field(None, ge=0)
    """groups started beyond the batch, as a share of it, of tasks without one of their own"""
    tail_batch_trigger_size: int | None = Field(None, ge=-1)
    """of tasks without one of their own"""
    tail_batch_max_tries: int | None = Field(None, ge=1)
    """of tasks without one of their own"""
    max_tries: int | None = Field(None, ge=1)
    """after so many failed or lost tries a group is a dead letter"""
    pause_timeout_s: float | None = Field(None, gt=0)
    """a worker that does not confirm a pause in this time is fenced"""
    concurrency: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] | None = None
    """groups in work at once in each worker, whatever its config says; auto: as many as keep its
    engine full
    """
    low_bytes: ByteSize | None = None
    """payload bytes from which no new prompt is started: a number, or text like 8GiB"""
    high_bytes: ByteSize | None = None
    """payload bytes from which nothing is started"""
    steps: int | None = Field(None, ge=1)
    """train steps in all"""
    tasks: dict[str, LiveTaskSettings] = Field(default_factory=dict)

    def applied(self, limits: RunLimits, taken: int) -> RunLimits:
        """`limits` with these changes. `taken`: the newest train step. ConfigError for a task that
        the run has not.
        """
        changed = limits.model_copy(deep=True)
        own = (
            "over_sample_threshold",
            "tail_batch_trigger_size",
            "tail_batch_max_tries",
            "max_tries",
            "pause_timeout_s",
            "concurrency",
            "low_bytes",
            "high_bytes",
            "steps",
        )
        for name in own:
            if (value := getattr(self, name)) is not None:
                setattr(changed, name, value)
        if self.max_staleness is not None:
            changed.stale_threshold = stale_threshold(
                self.max_staleness, limits.sync_weights_interval
            )
            if changed.lag != limits.lag:
                raise ConfigError(
                    "max_staleness cannot change in a run that has a max_token_staleness",
                    hint="its pools are scored by the difference of the two: start another run",
                )
        if 0 < changed.high_bytes < changed.low_bytes:
            raise ConfigError(
                f"low_bytes would be {changed.low_bytes}, above high_bytes = {changed.high_bytes}"
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
            if (value := getattr(task, field)) is not None:
                setattr(limits.tasks[name], field, value)

    def _reweigh(self, limits: RunLimits, from_step: int) -> None:
        weights = {
            name: task.weight for name, task in self.tasks.items() if task.weight is not None
        }
        if not weights:
            return
        now = {**limits.newest_weights(), **weights}
        if sum(now.values()) <= 0:
            raise ConfigError("no training task would have a weight above 0")
        earlier = [part for part in limits.reweighted if part.from_step < from_step]
        limits.reweighted = [*earlier, Reweighting(from_step=from_step, weights=now)]
        limits.reweighted = newest_parts(limits.reweighted, limits.mix())


def differences(before: RunLimits, after: RunLimits) -> dict[str, tuple[Any, Any]]:
    """What changed, by name: (before, after)."""
    old = before.model_dump()
    new = after.model_dump()
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}
