"""What `rolloutmq set` changed of a run, and what its config said then.

A value that was set holds until it is set again, or until the config has another value than at the
last start by hand. The record is in `meta`; the run's folder has a copy for the case that the
server loses everything. Names of settings: `max_staleness`, `tasks.math.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from buffer.limits import LiveLimits, RunLimits, TaskLimits, TaskSettings
from buffer.wire.staleness import max_staleness

FIELD = "settings"
"""The field of the run's `meta` that holds the record as JSON."""

THRESHOLDS = {"max_staleness": "stale_threshold", "max_ahead": "ahead_threshold"}
"""Settings in publications, by the field of the limits that has the same in train steps."""

TASK = "tasks."
"""Prefix of the name of a task's own setting."""


class Override(BaseModel):
    """A value that was set. `by`: a person as user@host, or the function that did it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Any
    set_ms: int
    by: str = ""


class SettingsRecord(BaseModel):
    """The values of the config at the last start by hand, and those that were set since.

    `configured` lacks what a task does not set itself. `written`: text of the file, for settings
    whose value depends on more. `overrides` has only what differs from `configured`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    configured: dict[str, Any] = {}
    written: dict[str, str] = {}
    overrides: dict[str, Override] = {}

    @classmethod
    def of(cls, limits: RunLimits, written: Mapping[str, str]) -> SettingsRecord:
        """Return the record of a run in which nothing was set."""
        return cls(configured=setting_values(limits), written=dict(written))

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> SettingsRecord:
        """Return the record in a run's meta hash, empty if missing. Raises ValueError."""
        return cls.model_validate_json(meta[FIELD]) if FIELD in meta else cls()

    def kept_by(self, config: SettingsRecord) -> dict[str, Override]:
        """Return the overrides of values that this config did not change."""
        return {
            name: override
            for name, override in self.overrides.items()
            if self._written(name) == config._written(name) and config.knows(name)
        }

    def knows(self, name: str) -> bool:
        """Return whether the config has the setting; it lacks those of a task that is gone."""
        task = task_of(name)
        return not task or f"{TASK}{task}.weight" in self.configured

    def _written(self, name: str) -> Any:
        return self.written.get(name, self.configured.get(name))

    def after(self, changed: Mapping[str, Any], now_ms: int, by: str) -> SettingsRecord:
        overrides = dict(self.overrides)
        for name, value in changed.items():
            known = overrides.pop(name, None)
            is_own = not task_of(name) or name in self.configured
            if is_own and value == self.configured.get(name):
                continue
            is_same = known is not None and known.value == value
            overrides[name] = known if known and is_same else Override(
                value=value, set_ms=now_ms, by=by
            )  # fmt: skip
        return self.model_copy(update={"overrides": overrides})

    def without(self, names: Collection[str]) -> SettingsRecord:
        overrides = {name: each for name, each in self.overrides.items() if name not in names}
        return self.model_copy(update={"overrides": overrides})


def task_of(name: str) -> str:
    """Return the task of a setting; "" for one of the run. The name of a task may have dots."""
    return name.removeprefix(TASK).rpartition(".")[0] if name.startswith(TASK) else ""


def setting_values(limits: RunLimits) -> dict[str, Any]:
    """Return the value of every setting, except those that a task has from the run."""
    values = {name: getattr(limits, name) for name in LiveLimits.model_fields}
    interval = limits.sync_weights_interval
    values |= publications(limits, interval)
    for task, weight in limits.newest_weights().items():
        own = limits.tasks[task]
        if own.is_gone:
            continue
        found = own.model_dump(include=set(TaskSettings.model_fields))
        found |= publications(own, interval) | {"weight": weight}
        values |= {f"{TASK}{task}.{name}": value for name, value in found.items()}
    return values


def publications(limits: RunLimits | TaskLimits, interval: int) -> dict[str, int]:
    """Return the settings of THRESHOLDS that `limits` has itself."""
    steps = {name: getattr(limits, field) for name, field in THRESHOLDS.items()}
    return {name: max_staleness(n, interval) for name, n in steps.items() if n is not None}
