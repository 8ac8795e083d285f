"""What may be changed while a run continues: `rolloutmq set max_staleness=2 tasks.math.weight=3`.

One script stores a checked change under a new version of the run's limits. Every process adopts it
at its next heartbeat, round or batch. The change belongs to the run
(buffer/control/settings_record.py). The run's folder keeps a copy (`KeptSettings`), since a server
may lose everything.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import ConfigDict, Field, ValidationError

from buffer.config.assignments import FIXED, key_path, parse_settings
from buffer.config.section import Section
from buffer.control.settings_record import (
    FIELD,
    TASK,
    THRESHOLDS,
    SettingsRecord,
    setting_values,
    task_of,
)
from buffer.errors import ConfigError, RunNotFound
from buffer.limits import LiveLimits, RunLimits, TaskLimits, TaskSettings
from buffer.redis.keys import Keys
from buffer.redis.scripts import unfenced, unknown_reply
from buffer.redis.store import Store
from buffer.redis.whole_file import replace_file
from buffer.task_mix import Reweighting, newest_parts
from buffer.wire.staleness import stale_threshold

CONFIG = "config"  # in place of a value: that of the config


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
    inherited, values = _restore(limits, record, restored)
    values |= wanted.values()
    after = LiveSettings.of(values).applied(inherited, taken)
    now_ms = time.time_ns() // 1_000_000
    new_record = record.without(restored).after(wanted.values(), now_ms, by)
    before = limits.model_dump()
    fields = [name for name, value in after.model_dump().items() if value != before[name]]
    old, new = setting_values(limits), setting_values(after)
    changed = {
        name: (old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    }
    return [*after.to_meta(fields), FIELD, new_record.model_dump_json()], changed


def write_settings(
    store: Store, keys: Keys, operation: str, version: int, producer: str, fields: Sequence[str]
) -> bool:
    """Store fields of the meta hash; return False if they changed since `version` was read.

    `producer`: the nonce of a producer that makes the change; "" for all others. Raises Fenced,
    RunNotFound.
    """
    reply: Any = store.call(
        "set_limits",
        keys.slots(),
        {"operation": operation, "version": version, "producer": producer},
        tail_args=fields,
        durable=True,
    )
    match unfenced(reply, "producer"):
        case ["OK", _]:
            return True
        case ["CONFLICT", _]:
            return False
        case ["NO_RUN"]:
            raise RunNotFound(f"there is no run {keys.run!r} any more")
        case other:
            raise unknown_reply("set_limits", other)


def parse_change(assignments: Sequence[str]) -> tuple[LiveSettings, list[str]]:
    """Parse "steps=300", and "steps=config", which restores a setting. Raises ConfigError."""
    restored = [word for word in assignments if word.partition("=")[2].strip() == CONFIG]
    given = [word for word in assignments if word not in restored]
    return parse_settings(LiveSettings, given), [".".join(key_path(word)) for word in restored]


def _restore(
    limits: RunLimits, record: SettingsRecord, names: Collection[str]
) -> tuple[RunLimits, dict[str, Any]]:
    """Return the limits without these values of tasks, and the values that the config has."""
    changed = limits.model_copy(deep=True)
    values = {}
    for name in names:
        _require_known(name, record)
        if name in record.configured:
            values[name] = record.configured[name]
            continue
        own, field = changed.tasks[task_of(name)], name.rpartition(".")[2]
        if threshold := THRESHOLDS.get(field):
            setattr(own, threshold, None)
            field = threshold
        own.model_fields_set.discard(field)
    return changed, values


def _require_known(name: str, record: SettingsRecord) -> None:
    """Raise ConfigError for an unknown setting, or one whose value in the config is unknown."""
    task, field = task_of(name), name.rpartition(".")[2]
    if task:
        is_known = field in LiveTaskSettings.model_fields and record.knows(name)
    else:
        is_known = name in record.configured
    if not is_known:
        raise ConfigError(
            f"{name} is no setting of this run, or the run does not know its config",
            hint="`set --help` lists the settings; a run of an older version knows its config once "
            "it was started again",
        )


FILE = "settings.json"


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
        for name in self.model_fields_set & LiveLimits.model_fields.keys():
            setattr(changed, name, getattr(self, name))
        _set_thresholds(self, changed, limits.sync_weights_interval)
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
        horizon = max(limits.largest_horizon(), changed.largest_horizon())
        self._reweigh(changed, taken + 1 + horizon)
        return changed

    @staticmethod
    def _apply_to_task(limits: RunLimits, name: str, task: LiveTaskSettings) -> None:
        if name not in limits.training_tasks or limits.tasks[name].is_gone:
            raise ConfigError(
                f"there is no training task {name!r}",
                hint=f"the training tasks are {', '.join(limits.training_tasks)}",
            )
        for field in task.model_fields_set - {"weight", *THRESHOLDS}:
            setattr(limits.tasks[name], field, getattr(task, field))
        _set_thresholds(task, limits.tasks[name], limits.sync_weights_interval)

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


def _set_thresholds(
    change: LiveSettings | LiveTaskSettings, limits: RunLimits | TaskLimits, interval: int
) -> None:
    for name in change.model_fields_set & THRESHOLDS.keys():
        setattr(limits, THRESHOLDS[name], stale_threshold(getattr(change, name), interval))
