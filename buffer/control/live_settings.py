"""What may be changed while a run continues: `rolloutmq set max_staleness=2 tasks.math.weight=3`.

A change is checked like a config file, stored under a new version of the run's limits by one
script, and adopted by every process at its next heartbeat, round or batch. It belongs to the run
(buffer/model/settings_record.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field

from buffer.config.problems import FIXED
from buffer.config.section import Section
from buffer.errors import ConfigError
from buffer.model.limits import LiveLimits, RunLimits, TaskSettings
from buffer.model.settings_record import TASK, task_of
from buffer.model.task_mix import Reweighting, newest_parts
from buffer.wire.staleness import stale_threshold

_BY_WORKERS = (
    "each worker reads it when it starts; change the config, then restart the workers one by one"
)
_FIXED: dict[str, Any] = {
    "group_time_limit_s": _BY_WORKERS,
    "enable_partial_rollout": _BY_WORKERS,
    "is_valid_sample_fn": _BY_WORKERS,
    "should_continue_fn": (
        "the producer reads it when it starts; change the config, then restart the producer"
    ),
    "sync_weights_interval": "ages are counted in it; start another run",
    "max_token_staleness": "the pools are ordered by it; start another run",
}


class LiveTaskSettings(Section, TaskSettings):
    """tasks.<name>: the settings of one training task."""

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    weight: float = Field(1.0, ge=0, le=1e6)
    """share of the task in a batch, from the first train step for which nothing was started yet"""
    max_staleness: int = Field(0, ge=0, le=1_000_000)
    """how many publications old the weights of a rollout of this task may be"""


class LiveSettings(Section, LiveLimits):
    """A change: only what was given is set.

    Usage:

        run.set(LiveSettings(max_tries=5, tasks={"math": LiveTaskSettings(weight=2.0)}))
    """

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    max_staleness: int = Field(0, ge=0, le=1_000_000)
    """how many publications old the weights of a rollout may be, in tasks that have no
    max_staleness of their own
    """
    tasks: dict[str, LiveTaskSettings] = Field(default_factory=dict)
    """settings of single tasks"""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the change that sets these values, by the names of the settings."""
        tree: dict[str, Any] = {}
        tasks: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            task = task_of(name)
            (tasks.setdefault(task, {}) if task else tree)[name.rpartition(".")[2]] = value
        return cls.model_validate({**tree, "tasks": tasks})

    def values(self) -> dict[str, Any]:
        """Return what is set, by the names of the settings."""
        names = self.model_fields_set - {"tasks"}
        own = {name: getattr(self, name) for name in type(self).model_fields if name in names}
        for task, settings in self.tasks.items():
            fields = settings.model_dump(exclude_unset=True)
            own |= {f"{TASK}{task}.{name}": value for name, value in fields.items()}
        return own

    def applied(self, limits: RunLimits, taken: int) -> RunLimits:
        """Return `limits` with these changes. `taken`: the newest train step.

        Raises ConfigError for an unknown task, and for values that do not fit together.
        """
        changed = limits.model_copy(deep=True)
        for name in self.model_fields_set & LiveLimits.model_fields.keys():
            setattr(changed, name, getattr(self, name))
        if "max_staleness" in self.model_fields_set:
            changed.stale_threshold = _threshold(self.max_staleness, limits)
        if 0 < changed.high_bytes < changed.low_bytes:
            raise ConfigError(
                f"low_bytes = {changed.low_bytes} must not exceed high_bytes = {changed.high_bytes}"
            )
        for name, task in self.tasks.items():
            self._apply_to_task(changed, name, task)
        if any(changed.token_lead(task) != limits.token_lead(task) for task in limits.tasks):
            raise ConfigError(
                "max_staleness cannot change in a run that has a max_token_staleness",
                hint="the pools are ordered by the difference of the two: start another run",
            )
        horizon = max(limits.largest_threshold(), changed.largest_threshold())
        self._reweigh(changed, taken + 1 + horizon)
        return changed

    @staticmethod
    def _apply_to_task(limits: RunLimits, name: str, task: LiveTaskSettings) -> None:
        if name not in limits.training_tasks or limits.tasks[name].is_gone:
            raise ConfigError(
                f"there is no training task {name!r}",
                hint=f"the training tasks are {', '.join(limits.training_tasks)}",
            )
        for field in task.model_fields_set - {"weight", "max_staleness"}:
            setattr(limits.tasks[name], field, getattr(task, field))
        if "max_staleness" in task.model_fields_set:
            limits.tasks[name].stale_threshold = _threshold(task.max_staleness, limits)

    def _reweigh(self, limits: RunLimits, from_step: int) -> None:
        weights = {
            name: task.weight
            for name, task in self.tasks.items()
            if "weight" in task.model_fields_set
        }
        if not weights:
            return
        now = {**limits.newest_weights(), **weights}
        if sum(now.values()) <= 0:
            raise ConfigError("no training task would have a weight above 0")
        earlier = [part for part in limits.reweighted if part.from_step < from_step]
        limits.reweighted = [*earlier, Reweighting(from_step=from_step, weights=now)]
        limits.reweighted = newest_parts(limits.reweighted, limits.mix())


def _threshold(max_staleness: int, limits: RunLimits) -> int:
    return stale_threshold(max_staleness, limits.sync_weights_interval)


def differences(before: RunLimits, after: RunLimits) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, by name: (before, after)."""
    old = before.model_dump()
    new = after.model_dump()
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}
