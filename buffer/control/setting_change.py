"""A change of settings as `rolloutmq set` makes it: what is asked for, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.config.assignments import key_path, parse_settings
from buffer.control.live_settings import LiveSettings, LiveTaskSettings, differences
from buffer.errors import ConfigError
from buffer.model.limits import RunLimits
from buffer.model.settings_record import FIELD, SettingsRecord, setting_values, task_of

CONFIG = "config"
"""In place of a value: that of the config."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """`limits` and `record` after a change. `changed`: (before, after) by setting.

    None is the value of a task that has none of its own.
    """

    limits: RunLimits
    record: SettingsRecord
    fields: Collection[str]
    """the limits that differ"""
    changed: Mapping[str, tuple[Any, Any]]

    def to_meta(self) -> list[str]:
        """Return field, value, field, value, … for the meta hash."""
        return [*self.limits.to_meta(self.fields), FIELD, self.record.model_dump_json()]


def change_settings(
    limits: RunLimits,
    record: SettingsRecord,
    wanted: LiveSettings,
    restored: Collection[str],
    taken: int,
    by: str,
) -> SettingChange:
    """Return what becomes of `limits` and `record` after train step `taken`; see `Run.set`.

    Raises ConfigError.
    """
    inherited, values = _restore(limits, record, restored)
    values |= wanted.values()
    after = LiveSettings.of(values).applied(inherited, taken)
    now_ms = time.time_ns() // 1_000_000
    new_record = record.without(restored).after(wanted.values(), now_ms, by)
    old, new = setting_values(limits), setting_values(after)
    changed = {
        name: (old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    }
    return SettingChange(after, new_record, list(differences(limits, after)), changed)


def parse_change(assignments: Sequence[str]) -> tuple[LiveSettings, list[str]]:
    """Return what assignments set, and the settings that get the value of the config again.

    For example, "steps=300" sets one, and "steps=config" restores one. Raises ConfigError.
    """
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
        if field == "max_staleness":
            field, own.stale_threshold = "stale_threshold", None
        own.model_fields_set.discard(field)
    return changed, values


def _require_known(name: str, record: SettingsRecord) -> None:
    """Raise ConfigError for a name that is no setting, or whose value in the config is unknown."""
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
