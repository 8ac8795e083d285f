"""Settings that change while a run continues: `rolloutmq set max_staleness=2 tasks.math.weight=3`.

One script stores a checked change under a new version of the run's limits. Every process adopts it
at its next heartbeat, round or batch. The change belongs to the run: it holds until the value is
set again, or until the config has another value than at the last start by hand. The record of that
is in `meta`, and a copy in the run's folder (`KeptSettings`), since a server may lose everything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buffer.config.assignments import FIXED, key_path, parse_settings
from buffer.config.section import Section
from buffer.errors import ConfigError
from buffer.limits import LiveLimits, RunLimits, TaskLimits, TaskSettings
from buffer.redis.whole_file import replace_file
from buffer.task_mix import Reweighting, newest_parts
from buffer.wire.staleness import max_staleness, stale_threshold

FIELD = "settings"
"""The field of the run's `meta` that holds the record as JSON."""

FILE = "settings.json"
"""The copy of the record in the run's folder."""

CONFIG = "config"  # in place of a value: that of the config

THRESHOLDS = {"max_staleness": "stale_threshold", "max_ahead": "ahead_threshold"}
"""Settings in publications, by the field of the limits that has the same in train steps."""

TASK = "tasks."
"""Prefix of the name of a task's own setting, such as `tasks.math.weight`."""


def task_of(name: str) -> str:
    """Return the task of a setting; "" for one of the run. The name of a task may have dots."""
    return name.removeprefix(TASK).rpartition(".")[0] if name.startswith(TASK) else ""


def setting_values(limits: RunLimits) -> dict[str, Any]:
    """Return the value of every setting, except those that a task has from the run."""
    interval = limits.sync_weights_interval
    values = {name: getattr(limits, name) for name in LiveLimits.model_fields}
    values |= publications(limits, interval)
    for task, weight in limits.newest_weights().items():
        own = limits.tasks[task]
        if not own.is_gone:
            found = own.model_dump(include=set(TaskSettings.model_fields))
            found |= publications(own, interval) | {"weight": weight}
            values |= {f"{TASK}{task}.{name}": value for name, value in found.items()}
    return values


def publications(limits: RunLimits | TaskLimits, interval: int) -> dict[str, int]:
    """Return the settings of THRESHOLDS that `limits` has itself."""
    steps = {name: getattr(limits, field) for name, field in THRESHOLDS.items()}
    return {name: max_staleness(n, interval) for name, n in steps.items() if n is not None}


# -- the record ------------------------------------------------------------------------------------


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
    def from_meta(cls, meta: Mapping[str, str]) -> SettingsRecord:
        """Return the record in a run's meta hash, empty if missing. Raises ValueError."""
        return cls.model_validate_json(meta[FIELD]) if FIELD in meta else cls()

    def kept_by(self, config: SettingsRecord) -> dict[str, Override]:
        """Return the overrides of values that this config did not change."""

        before, now = ({**each.configured, **each.written} for each in (self, config))
        return {
            name: override
            for name, override in self.overrides.items()
            if before.get(name) == now.get(name) and config.knows(name)
        }

    def knows(self, name: str) -> bool:
        """Return whether the config has the setting; it lacks those of a task that is gone."""
        task = task_of(name)
        return not task or f"{TASK}{task}.weight" in self.configured

    def after(self, changed: Mapping[str, Any], by: str) -> SettingsRecord:
        """Return the record after these values were set now."""
        now_ms = time.time_ns() // 1_000_000
        overrides = dict(self.overrides)
        for name, value in changed.items():
            known = overrides.pop(name, None)
            is_own = not task_of(name) or name in self.configured
            if not (is_own and value == self.configured.get(name)):
                new = Override(value=value, set_ms=now_ms, by=by)
                overrides[name] = known if known and known.value == value else new
        return self.model_copy(update={"overrides": overrides})

    def without(self, names: Collection[str]) -> SettingsRecord:
        overrides = {name: each for name, each in self.overrides.items() if name not in names}
        return self.model_copy(update={"overrides": overrides})


class KeptSettings:
    """Keeps the record of a run in its folder: what each process last read from the server."""

    def __init__(self, folder: Path, nonce: str) -> None:
        self._file = folder / FILE
        self._nonce = nonce
        self._last: SettingsRecord | None = None

    def keep(self, record: SettingsRecord) -> None:
        """Write the record to disk, unless it is the one that was written last."""
        if record == self._last:
            return
        data = orjson.dumps({"nonce": self._nonce, "record": record.model_dump(mode="json")})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, data)
        self._last = record

    def read(self) -> SettingsRecord | None:
        """Return the record; None if the folder has none of this run. Raises ConfigError."""
        try:
            content = orjson.loads(self._file.read_bytes())
            if content["nonce"] != self._nonce:
                return None
            return SettingsRecord.model_validate(content["record"])
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"{self._file} does not contain the settings of a run",
                hint="remove it: the run then begins with the values of its config, and what "
                "`rolloutmq set` had changed must be set again",
            ) from error


# -- a change --------------------------------------------------------------------------------------

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
    max_ahead: int = Field(0, ge=0, le=1_000_000)
    """how many publications ahead of the trainer groups of this task are started"""


class LiveSettings(Section, LiveLimits):
    """A change: only what was given is set."""

    model_config = ConfigDict(json_schema_extra={FIXED: _FIXED})

    max_staleness: int = Field(0, ge=0, le=1_000_000)
    """how many publications old the weights of a rollout may be, in tasks that have no
    max_staleness of their own
    """
    max_ahead: int = Field(0, ge=0, le=1_000_000)
    """how many publications ahead of the trainer groups are started, in tasks that have no
    max_ahead of their own
    """
    tasks: dict[str, LiveTaskSettings] = Field(default_factory=dict)
    """settings of single tasks"""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        tree: dict[str, Any] = {}
        tasks: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            task = task_of(name)
            (tasks.setdefault(task, {}) if task else tree)[name.rpartition(".")[2]] = value
        return cls.model_validate({**tree, "tasks": tasks})

    def values(self) -> dict[str, Any]:
        names = self.model_fields_set - {"tasks"}
        own = {name: getattr(self, name) for name in type(self).model_fields if name in names}
        for task, settings in self.tasks.items():
            fields = settings.model_dump(exclude_unset=True)
            own |= {f"{TASK}{task}.{name}": value for name, value in fields.items()}
        return own

    def applied(self, limits: RunLimits, taken: int) -> RunLimits:
        """Return changed limits after train step `taken`. Raises ConfigError for invalid ones."""
        changed = limits.model_copy(deep=True)
        _set_fields(self, changed, limits.sync_weights_interval)
        if 0 < changed.high_bytes < changed.low_bytes:
            raise ConfigError(
                f"low_bytes = {changed.low_bytes} must not exceed high_bytes = {changed.high_bytes}"
            )
        for name, task in self.tasks.items():
            if name not in limits.training_tasks or limits.tasks[name].is_gone:
                raise ConfigError(
                    f"there is no training task {name!r}",
                    hint=f"the training tasks are {', '.join(limits.training_tasks)}",
                )
            _set_fields(task, changed.tasks[name], limits.sync_weights_interval)
        if any(changed.token_lead(task) != limits.token_lead(task) for task in limits.tasks):
            raise ConfigError(
                "max_staleness cannot change in a run that has a max_token_staleness",
                hint="the pools are ordered by the difference of the two: start another run",
            )
        weighted = {n: t.weight for n, t in self.tasks.items() if "weight" in t.model_fields_set}
        if weighted:
            # a weight holds from the first step for which nothing was started yet
            from_step = taken + 1 + max(limits.largest_horizon(), changed.largest_horizon())
            earlier = [part for part in changed.reweighted if part.from_step < from_step]
            changed.reweighted = [*earlier, reweighting(changed, weighted, from_step)]
            changed.reweighted = newest_parts(changed.reweighted, changed.mix())
        return changed


def reweighting(limits: RunLimits, weights: Mapping[str, float], step: int) -> Reweighting:
    """Return new weights of some tasks from a step on. Raises ConfigError if all would be 0."""
    now = {**limits.newest_weights(), **weights}
    if sum(now.values()) <= 0:
        raise ConfigError("no training task would have a weight above 0")
    return Reweighting(from_step=step, weights=now)


def _set_fields(
    change: LiveSettings | LiveTaskSettings, limits: RunLimits | TaskLimits, interval: int
) -> None:
    for name in change.model_fields_set - {"weight", "tasks"}:
        value = getattr(change, name)
        if name in THRESHOLDS:
            setattr(limits, THRESHOLDS[name], stale_threshold(value, interval))
        else:
            setattr(limits, name, value)


def parse_change(assignments: Sequence[str]) -> tuple[LiveSettings, list[str]]:
    """Parse "steps=300", and "steps=config", which restores a setting. Raises ConfigError."""
    restored = [word for word in assignments if word.partition("=")[2].strip() == CONFIG]
    given = [word for word in assignments if word not in restored]
    return parse_settings(LiveSettings, given), [".".join(key_path(word)) for word in restored]


def change_settings(
    limits: RunLimits,
    record: SettingsRecord,
    wanted: LiveSettings,
    restored: Collection[str],
    taken: int,
    by: str,
) -> tuple[list[str], dict[str, tuple[Any, Any]]]:
    """Change `limits` and `record` after train step `taken`; see `Run.set`. Raises ConfigError.

    Returns field, value, field, value, … for the meta hash, and (before, after) by setting; None
    for a task without a value of its own.
    """
    inherited = limits.model_copy(deep=True)
    values: dict[str, Any] = {}
    for name in restored:
        task, field = task_of(name), name.rpartition(".")[2]
        if name in record.configured:
            values[name] = record.configured[name]
        elif task and field in LiveTaskSettings.model_fields and record.knows(name):
            # the config has no value of this task: it follows the run again
            own, field = inherited.tasks[task], THRESHOLDS.get(field, field)
            if field in THRESHOLDS.values():
                setattr(own, field, None)
            own.model_fields_set.discard(field)
        else:
            raise ConfigError(
                f"{name} is no setting of this run, or the run does not know its config",
                hint="`set --help` lists the settings; a run of an older version knows its config "
                "once it was started again",
            )
    after = LiveSettings.of(values | wanted.values()).applied(inherited, taken)
    new_record = record.without(restored).after(wanted.values(), by)
    before = limits.model_dump()
    fields = [name for name, value in after.model_dump().items() if value != before[name]]
    old, new = setting_values(limits), setting_values(after)
    changed = {
        name: (old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    }
    return [*after.to_meta(fields), FIELD, new_record.model_dump_json()], changed
